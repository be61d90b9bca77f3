"""The kernels of the package on the processor, between processes: no GPU is needed, and no MPI.

``simulation/`` is CUDA's language in C++ (cuda.hpp), a block of CUDA threads as fibers of one thread (block.cpp), and
the program that runs kernels (launcher.cpp). g++ compiles the same .cu files against it. Each rank is a process of its
own which maps the memory of all ranks at addresses of its own; or, for ThreadSanitizer, ranks are threads of one
process. Which thread of a block runs next is drawn at each barrier and at each access of memory_order.cuh.

To add a kernel:

1. `Builds.kernel(source, entry, options)` compiles it; `launches.kernel_of` does for a `Variant` of the package. It
   may use what cuda.hpp has: indices and sizes in x, static ``__shared__``, all forms of ``__syncthreads``, shuffles
   and votes of a warp, vectors of 2 and 4, hints for caches, atomics. A wait has to go through memory_order.cuh, where
   each access lets other threads run. 16 bytes that are polled are two accesses there, as nothing promises more. A
   launch that may begin early (programmatic dependent launch) begins when the one before it is over.
2. Something that makes its arguments for a rank: see `exchange_rig` and `packet_rig`, which have the package do it.
   Memory comes from `Machine.allocate` and `Machine.place`, whose addresses are a rank's own.
3. `Machine.launch(rank, kernel, parameters, blocks, threads)` for each rank, in stream order, then `Machine.run`, and a
   comparison with a reference: see `kernel_calls`.
4. Runs between processes (test_between_processes), the same under ThreadSanitizer (test_races), and a control for each
   thing that the kernel's protocol stands on: a change of its source that one of these runs catches
   (test_negative_controls).
"""
