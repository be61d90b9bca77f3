"""Messages of GPU arrays between two ranks: MPI matches a description, the data stays on the devices."""
