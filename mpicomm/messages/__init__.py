"""Messages: the point-to-point calls of a communicator on GPU arrays, in any mixture with host arrays.

MPI matches every message by source and tag. How the data travels depends on the ranks:

- *Described*: between GPUs of one node the sender copies the message into its *outbox*, memory of its GPU that peers
  open, and MPI carries only a *description* of where the data lies. The receiver's GPU copies the data out of the
  outbox.
- *Eager*: every other message of a GPU array is copied into pinned host memory, and MPI carries the data.

A receiver learns which of the two it meets when MPI has received. So MPI never gets a GPU array: it receives into host
memory that stands for the array, and a receive into a host array, too, has to look for a description.

- `calls`, `endpoint`: the calls of one communicator, and the buffers of one call.
- `outgoing`, `receive_buffer`, `pending`: the host memory that MPI gets for a buffer, and calls in flight.
- `description`, `outbox`, `place`, `in_flight`, `rendezvous`, `memory`: the rendezvous, from the copy into the outbox
  to its teardown.
- `incoming`, `matched`, `unexpected`, `self_messages`: messages that a probe has matched before they are received.
- `in_stream_order`: messages that kernels match, without MPI and the host.
- `device`: the operations of a GPU that messages need.
"""
