// A step of a message from one rank to another: waits for counts, copies bytes, stores counts. Each part is optional.
//
// The data of a message lies in memory of the sender, see messages/outbox.py. A message has words for counts there:
// `ready` words, which the sender stores, and `done` words, which the receiver stores. The host chooses the counts,
// because MPI has matched the message there: so no captured graph can hold this kernel.
//
// A step of several blocks copies a part of the bytes with each block, and has a word for each block. Sender and
// receiver cut alike, because the parts depend on the number of bytes and of blocks alone. So a block of the receiver
// waits for the one block of the sender that has written its part, and the blocks of a kernel need not meet.
//
// A kernel waits only for kernels of other ranks that have been enqueued: MPI brings the description of a message
// after the sender has enqueued its step.

#include "bytes.cuh"
#include "faults.cuh"

namespace mpicomm {

// The host's copies of this structure and these constants are in message.py; a test compares them.
constexpr u32 kMessageThreads = 512;

struct MessageStep {
  u8* target;
  const u8* source;
  u64 nbytes;          // 0 where nothing is copied
  const u64* awaited;  // a word for each block, null where the step does not wait
  u64* stored;         // a word for each block, null where the step stores nothing
  u64 count;           // the count that `awaited` must reach and that `stored` becomes
  u64 number;          // of the message, for the fault record
  u64 timeout_ns;
  FaultRecord* record;
  const u32* failed;
  u32 peer;
  u32 unused;
};

MPICOMM_DEVICE void carry(const MessageStep& x) {
  const u32 block = blockIdx.x;
  bool ok = true;
  if (threadIdx.x == 0 && x.awaited != nullptr) {
    const Watch watch{{x.record, x.failed}, x.timeout_ns, kMessage, x.number, block, x.peer};
    // Pairs with the release below, of the other rank: this block, and later work of this stream, read the bytes that
    // the other rank's block has written. With a plain load they could read the bytes of an earlier message. The
    // difference is signed, as for every flag: later pieces of the message may have come, too.
    const u64* const word = x.awaited + block;
    ok = spin_until([=] { return static_cast<long long>(load_acquire(word) - x.count) >= 0; }, watch);
  }
  // All threads leave or none: a thread that went on alone would wait at the next barrier for ever. The barrier also
  // orders the loads of the whole block after the acquire of thread 0.
  if (!__syncthreads_and(ok)) return;

  const u64 lines = (x.nbytes + kLineNbytes - 1) / kLineNbytes;
  const u64 part = (lines + gridDim.x - 1) / gridDim.x * kLineNbytes, begin = block * part;
  if (begin < x.nbytes) {
    const u64 some = x.nbytes - begin < part ? x.nbytes - begin : part;
    copy_bytes(x.target + begin, x.source + begin, some, threadIdx.x, blockDim.x);
  }
  // Orders the copies of the whole block before the release of thread 0, which would publish its own copies alone.
  __syncthreads();
  if (threadIdx.x == 0 && x.stored != nullptr) {
    // After a failed wait `ready` must not say that this rank's data is right. And `done` must not say that a message
    // was taken, because the sender would use its memory again. Pairs with the store in report_fault: a wait of this
    // stream was an earlier kernel, so its store is there.
    if (load_relaxed(x.failed) != kClear) return;
    // `ready` pairs with the acquire above, and publishes the copies of this block and all earlier work of this stream.
    // A plain store could arrive before them, and the receiver would copy the bytes of an earlier message. `done` pairs
    // with the copy by which the sender's host reads these words (Outbox in messages/outbox.py). It says that the loads
    // of the message are over: if it came earlier, the next message would overwrite data that is still being read.
    store_release(x.stored + block, x.count);
  }
}

}  // namespace mpicomm

extern "C" __global__ void __launch_bounds__(mpicomm::kMessageThreads)
    mpicomm_message(const __grid_constant__ mpicomm::MessageStep);

MPICOMM_KERNEL void mpicomm_message(const __grid_constant__ mpicomm::MessageStep x) { mpicomm::carry(x); }
