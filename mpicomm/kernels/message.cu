// A step of a message from one rank to another: it waits for counts, copies bytes, and adds to
// counts. Each part is optional.
//
// The data of a message lies in memory of the sender, see messages/outbox.py. A message has a line
// of counts there: the sender adds to the `ready` words, and the receiver adds to the `done` words.
// Between two messages all words of a kind have the same count, and `ready` and `done` are equal.
// So a message with the same place, arrays and ranks as an earlier message has the same step. A
// graph can launch this step again.
//
// In a step of several blocks, each block copies a part of the bytes, and the blocks share the
// words. Sender and receiver make the same parts, because these depend only on the number of bytes and
// the number of blocks. So a block of the receiver waits only for the block of the sender that
// writes its part. The blocks of a kernel need not meet.
//
// A kernel waits only for kernels that other ranks have enqueued or enqueue at once. A sender gives
// MPI the rendezvous header of the message, and waits for nothing between that and its step. No
// captured graph can hold this kernel, because MPI has matched the message on the host.

#include "bytes.cuh"
#include "faults.cuh"

namespace mpicomm {

// The host's copies of this structure and these constants are in message.py; a test compares them.
constexpr u32 kMessageThreads = 512;
constexpr u32 kMessageWords = 32;  // of each kind, which is also the largest number of blocks of a step

struct MessageStep {
  u8* target;
  const u8* source;
  u64 nbytes;  // 0 if the step copies nothing
  u64* ready;  // kMessageWords words
  u64* done;   // kMessageWords words
  u64 timeout_ns;
  FaultRecord* record;
  const u32* failed;
  u32 awaits;  // how far `ready` is ahead of `done` when the data is there; 0 if the step does not wait
  u32 sent;    // the step adds it to `ready`
  u32 taken;   // the step adds it to `done`
  u32 peer;
};

MPICOMM_DEVICE void carry(const MessageStep& x) {
  const u32 block = blockIdx.x;
  bool ok = true;
  if (threadIdx.x == 0 && x.awaits != 0) {
    // The last message of this line has ended. The store of its receiver is in the sender's memory,
    // because the sender uses a line again only after it has seen this store. So this count cannot
    // be old.
    const u64 count = load_relaxed(x.done + block) + x.awaits;
    const Watch watch{{x.record, x.failed}, x.timeout_ns, kMessage, count, block, x.peer};
    // Pairs with the release below by the other rank: this block, and later work of this stream,
    // read the bytes that the block of the other rank has written. With a plain load they could
    // read the bytes of an earlier message. The difference is signed, as for every flag, and it may
    // be larger, because later pieces of the message may have come, too.
    const u64* const word = x.ready + block;
    ok = spin_until([=] { return static_cast<long long>(load_acquire(word) - count) >= 0; }, watch);
  }
  // All threads leave or no thread leaves: a thread that went on alone would wait at the next
  // barrier for ever. The barrier also orders the loads of the whole block after the acquire of
  // thread 0.
  if (!__syncthreads_and(ok)) return;

  const u64 lines = (x.nbytes + kLineNbytes - 1) / kLineNbytes;
  const u64 part = (lines + gridDim.x - 1) / gridDim.x * kLineNbytes, begin = block * part;
  if (begin < x.nbytes) {
    const u64 some = x.nbytes - begin < part ? x.nbytes - begin : part;
    copy_bytes(x.target + begin, x.source + begin, some, threadIdx.x, blockDim.x);
  }
  // Orders the copies of the whole block before the releases below. Otherwise each release would
  // publish only the copies of its thread.
  __syncthreads();
  // Each block adds to the word of its number, which says that its part is there. It also adds to
  // words for which no block waits, because the next message of the line may have more blocks.
  if (threadIdx.x < kMessageWords && threadIdx.x % gridDim.x == block) {
    // After a failed wait `ready` must not publish wrong data of this rank. And `done` must not
    // signal that this rank has taken a message, because the sender would use its memory again.
    // Pairs with the store in report_fault: a wait of this stream was an earlier kernel, so its
    // store is there.
    if (load_relaxed(x.failed) != kClear) return;
    // `ready` pairs with the acquire above, and publishes the copies of this block and all earlier
    // work of this stream. A plain store could arrive before them, and the receiver would copy the
    // bytes of an earlier message. `done` pairs with the copy by which the sender's host reads
    // these words (Outbox in messages/outbox.py). It says that the loads of the message have ended.
    // If it came earlier, the next message would overwrite data while this block still reads it. No
    // other thread writes these words meanwhile, so a load and a store add to them.
    u64* const ready = x.ready + threadIdx.x;
    u64* const done = x.done + threadIdx.x;
    if (x.sent != 0) store_release(ready, load_relaxed(ready) + x.sent);
    if (x.taken != 0) store_release(done, load_relaxed(done) + x.taken);
  }
}

}  // namespace mpicomm

extern "C" __global__ void __launch_bounds__(mpicomm::kMessageThreads)
    mpicomm_message(const __grid_constant__ mpicomm::MessageStep);

MPICOMM_KERNEL void mpicomm_message(const __grid_constant__ mpicomm::MessageStep x) { mpicomm::carry(x); }
