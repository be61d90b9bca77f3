"""Messages: the point-to-point calls of a communicator on GPU arrays, in any mixture with host arrays.

MPI matches every message by source and tag. How the data travels depends on the ranks:

- *Rendezvous*: between GPUs of one node the sender copies the message into its *outbox*, memory of its GPU that peers
  open. MPI carries only a *rendezvous header*, which says where the data lies. The receiver's GPU copies the data out
  of the outbox.
- *Eager*: every other message of a GPU array is copied into pinned host memory, and MPI carries the data.

A receiver learns the kind of the message only when MPI has received it. So MPI never gets a GPU array, but host memory
in place of the array. A header may also come to a receive into a host array.

- `calls`, `reader`, `endpoint`: the calls of one communicator, and the buffers of one call.
- `outgoing`, `receive_buffer`: the sends, and the host memory that MPI gets for a receive.
- `rendezvous_header`, `outbox`, `in_flight`, `rendezvous`: the rendezvous, from the copy into the outbox to its
  teardown.
- `unexpected`: the queue of messages that a probe has matched before a call receives them.
"""
