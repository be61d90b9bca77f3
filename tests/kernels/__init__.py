"""The kernels of the package on the processor, between processes: no GPU is needed, and no MPI.

``simulation/`` is CUDA's language in C++ (cuda.hpp), a block of CUDA threads as fibers of one thread (block.cpp), and
the program that runs kernels (launcher.cpp). g++ compiles the same .cu files against it. Each rank is a process that
maps the memory of all ranks at its own addresses. For ThreadSanitizer, ranks are threads of one process. Each barrier
and each access of memory_order.cuh draws the thread of the block that runs next.

To add a kernel:

1. `Builds.kernel(source, entry, options)` compiles it; `machine.kernel_of` compiles a `Variant` of the package. The
   kernel may use the parts of CUDA that cuda.hpp has. These are indices and sizes in x, static ``__shared__``, and all
   forms of ``__syncthreads``. Shuffles and votes of a warp, vectors of 2 and 4, hints for caches, and atomics are
   there, too. A wait has to go through memory_order.cuh, where each access lets other threads run. A poll of 16 bytes
   is two accesses there, because CUDA promises no more. A launch that may begin early (programmatic dependent launch)
   begins after the launch before it.
2. A rig makes the arguments for a rank: see rig.py, which lets launchers of the package make them. Memory comes from
   `Machine.allocate` and `Machine.place`, whose addresses hold for one rank.
3. `Machine.launch(rank, kernel, parameters, blocks, threads)` for each rank, in stream order, then `Machine.run`, and a
   comparison with a reference: see `kernel_calls`. A kernel of collectives needs only rows of test_collectives.
4. Runs between processes, and the same runs under ThreadSanitizer. Each flag, fence and barrier of the kernel's
   protocol needs a control: a change of the source that one of these runs catches. `machine.controls` makes a test of
   a table of changes: see test_negative_controls. One build has many of them (mistakes.py), because g++ takes longer
   than most runs, and runs without a mistake take it, too (`machine.without_mistake`). For the same reason calls that
   differ in nothing that matters have the same type and number of ranks.
"""
