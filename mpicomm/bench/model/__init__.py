"""A model of cost: predicts collectives over several nodes from measured times of one node and assumed network figures.

In the model a *group* is a peer domain. `group` reads the measurements, `network` has the cost of a step, `schedules`
and `nccl` add the costs up. `accuracy` compares with measured runs over several nodes. `command` is ``python -m
mpicomm.bench --model``. All of it is local.
"""
