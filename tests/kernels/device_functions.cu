// A kernel of a user for each function of mpicomm.cuh. GROUP is Thread, Warp or Block. Every group
// of a block works by itself, with its own flags and memory.
//
// In each round threads of a group write data, the function moves the data, and other threads copy
// it to `seen`. So a function that lets a thread go on too early shows as a race.

#include <mpicomm.cuh>

using mpicomm::part;
using mpicomm::u32;
using mpicomm::u64;
using mpicomm::u8;
using Group = mpicomm::GROUP;

namespace user {

MPICOMM_DEVICE u32 number_of(mpicomm::Thread) { return mpicomm::thread_of_block(); }
MPICOMM_DEVICE u32 number_of(mpicomm::Warp) { return mpicomm::thread_of_block() / 32; }
MPICOMM_DEVICE u32 number_of(mpicomm::Block) { return 0; }

// The ranks and groups of a kernel, and its messages: one for each round and group, `stride` bytes
// apart. A message begins `offset` bytes after its place in the memory of senders, `end_offset`
// bytes after it in the memory of receivers.
struct Run {
  u32 rank, size, rounds, groups;
  u64 timeout_ns;
  u32* failed;  // a word for each thread
  u64 nbytes, stride;
  u32 offset, end_offset;

  MPICOMM_DEVICE u32 group() const { return number_of(Group()); }
  MPICOMM_DEVICE u32 previous() const { return (rank + size - 1) % size; }
  MPICOMM_DEVICE u32 next() const { return (rank + 1) % size; }
  MPICOMM_DEVICE u64 message(u32 round) const { return round * groups + group(); }
  MPICOMM_DEVICE void fail() const { failed[mpicomm::thread_of_block()] = 1; }

  // Writes the message of this rank, byte by byte with all threads of the group.
  MPICOMM_DEVICE void fill(u8* data, u32 round) const {
    for (u64 i = Group().number(); i < nbytes; i += Group().size()) {
      data[i] = static_cast<u8>(rank * 37 + message(round) * 11 + i * 7 + (i >> 5));
    }
  }
  // Copies a message with the threads in another order.
  MPICOMM_DEVICE void look(u8* seen, const u8* data) const {
    for (u64 i = Group().size() - 1 - Group().number(); i < nbytes; i += Group().size()) seen[i] = data[i];
  }
};

}  // namespace user

using user::Run;

MPICOMM_KERNEL void put_around(Run x, const u64* inboxes, const u64* flags, u8* mine, u8* seen) {
  for (u32 round = 0; round < x.rounds; ++round) {
    const u64 at = x.message(round) * x.stride;
    x.fill(mine + at + x.offset, round);
    mpicomm::put(Group(), part<u8>(inboxes, x.next()) + at + x.end_offset, mine + at + x.offset, x.nbytes);
    mpicomm::signal(Group(), part<u64>(flags, x.next()) + x.group(), round + 1);
    if (!mpicomm::wait(Group(), part<u64>(flags, x.rank) + x.group(), round + 1, x.timeout_ns)) return x.fail();
    x.look(seen + at, part<u8>(inboxes, x.rank) + at + x.end_offset);
  }
}

MPICOMM_KERNEL void get_around(Run x, const u64* outboxes, const u64* flags, u8* got, u8* seen) {
  for (u32 round = 0; round < x.rounds; ++round) {
    const u64 at = x.message(round) * x.stride;
    x.fill(part<u8>(outboxes, x.rank) + at + x.offset, round);
    mpicomm::signal(Group(), part<u64>(flags, x.next()) + x.group(), round + 1);
    if (!mpicomm::wait(Group(), part<u64>(flags, x.rank) + x.group(), round + 1, x.timeout_ns)) return x.fail();
    mpicomm::get(Group(), got + at + x.end_offset, part<u8>(outboxes, x.previous()) + at + x.offset, x.nbytes);
    x.look(seen + at, got + at + x.end_offset);
  }
}

// Every rank sends to every other one. `slots` have two sets for each sender.
MPICOMM_KERNEL void packets_to_all(Run x, const u64* slots, u8* mine, u8* got, u8* seen) {
  const u64 set = mpicomm::packets_nbytes(x.nbytes);
  const auto slots_of = [&](u32 owner, u32 sender, u32 round) {
    return part<u8>(slots, owner) + ((round % 2 * x.size + sender) * x.groups + x.group()) * set;
  };
  for (u32 round = 0; round < x.rounds; ++round) {
    u8* const data = mine + x.message(round) * x.stride + x.offset;
    x.fill(data, round);
    for (u32 peer = x.next(); peer != x.rank; peer = (peer + 1) % x.size) {
      mpicomm::send_packets(Group(), slots_of(peer, x.rank, round), data, x.nbytes, round + 1);
    }
    for (u32 peer = x.next(); peer != x.rank; peer = (peer + 1) % x.size) {
      const u64 at = (x.message(round) * x.size + peer) * x.stride;
      u8* const to = got + at + x.end_offset;
      if (!mpicomm::receive_packets(Group(), to, slots_of(x.rank, peer, round), x.nbytes, round + 1, x.timeout_ns)) {
        return x.fail();
      }
      x.look(seen + at, to);
    }
  }
}

// The first block hands messages to the second one.
MPICOMM_KERNEL void between_blocks(Run x, u8* data, u64* flags, u8* seen) {
  constexpr auto kDevice = mpicomm::Scope::kDevice;
  for (u32 round = 0; round < x.rounds; ++round) {
    const u64 at = x.message(round) * x.stride;
    if (blockIdx.x == 0) {
      x.fill(data + at, round);
      mpicomm::signal<kDevice>(Group(), flags + x.group(), round + 1);
    } else {
      if (!mpicomm::wait<kDevice>(Group(), flags + x.group(), round + 1, x.timeout_ns)) return x.fail();
      x.look(seen + at, data + at);
    }
  }
}

// All ranks write, meet, and read the words of all others; they meet again before they write there
// again.
MPICOMM_KERNEL void meet(Run x, const u64* boards, const u64* flags, u8* seen) {
  const auto all_meet = [&] {
    return mpicomm::barrier(Group(), flags, x.group(), x.rank, x.size, x.timeout_ns);
  };
  const u64 at = x.group() * x.stride;
  for (u32 round = 0; round < x.rounds; ++round) {
    x.fill(part<u8>(boards, x.rank) + at, round);
    if (!all_meet()) return x.fail();
    for (u32 peer = 0; peer < x.size; ++peer) {
      x.look(seen + (x.message(round) * x.size + peer) * x.stride, part<u8>(boards, peer) + at);
    }
    if (!all_meet()) return x.fail();
  }
}

#if defined(OPERATION)
// Reduces values of DTYPE: `nbytes` of them in each message. Each rank publishes values, and reads
// the values of all ranks.
MPICOMM_KERNEL void reduce_all(Run x, const u64* boards, const u64* flags, const u8* values, u8* result, u8* seen) {
  using T = mpicomm::dtype::DTYPE;
  for (u32 round = 0; round < x.rounds; ++round) {
    const u64 at = x.message(round) * x.stride;
    u8* const own = part<u8>(boards, x.rank) + at + x.offset;
    x.look(own, values + at);
    if (!mpicomm::barrier(Group(), flags, x.group(), x.rank, x.size, x.timeout_ns)) return x.fail();
    T* const to = reinterpret_cast<T*>(result + at + x.end_offset);
    const u64 first = (at + x.offset) / sizeof(T);
    mpicomm::reduce_load<mpicomm::op::OPERATION>(Group(), to, boards, x.size, first, x.nbytes / sizeof(T));
    x.look(seen + at, result + at + x.end_offset);
  }
}
#endif
