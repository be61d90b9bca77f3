"""Observation: puts records of calls into a communicator if the environment asks for records.

It gives the objects of one communicator subclasses of their classes, once. So a program that asks for no records runs
the same code as if this room did not exist.

- `calls`: the recorded methods, and the arguments and buffers of a call.
- `subclasses`: subclasses with methods that record, for communicators, requests, symmetric arrays and shared events.
- `inside`: subclasses of the parts of a communicator that know the algorithm of a call and enqueue its work.
"""
