// Team, which every kernel of a communicator gets as an argument, and the header of an arena. By
// the words of the header, ranks count their launches, announce their launches and calls, and give up
// together.
//
// An arena is memory of one rank that all ranks have mapped. Its header is all zero at first:
//
//     abort word       a rank that gives up stores its reason there, in every arena
//     announcements    of each rank: which launches it has begun, and the tags of its calls
//     sent             to each rank: a copy of the announcements of this rank to it
//     numbers          the number of the last launch, once for each block
//
// Three rules hold for all kernels of several ranks:
// - All blocks of a launch run at once, because a block waits for blocks of other ranks. If one of
//   these blocks waited for a free multiprocessor, the ranks could wait for each other in a circle.
//   So the host launches at most as many blocks as the smallest device runs at once. Kernels of two
//   communicators may still keep each other out of a small device: then time runs out, and both
//   report it.
// - Every kernel bounds its registers with __launch_bounds__, so that its blocks always fit on a
//   multiprocessor. If a launch failed on one rank, its peers would wait.
// - A rank that stores to several peers begins with the next rank. So at any time one rank stores
//   to each rank.
#pragma once

#include "bytes.cuh"
#include "faults.cuh"

namespace mpicomm {

// The host's copies of these constants and of Team are in team.py; a test compares them.
constexpr u32 kMaxRanks = 8;
constexpr u32 kMaxBlocks = 256;
constexpr u64 kAnnouncements = kLineNbytes;  // the offset in an arena, after the line of the abort word
constexpr u64 kSentAnnouncements = kAnnouncements + kMaxRanks * 2 * sizeof(u64);
constexpr u64 kNumbers = kSentAnnouncements + kMaxRanks * 2 * sizeof(u64);
constexpr u64 kArenaHeaderNbytes = kNumbers + kMaxBlocks * sizeof(u64);

struct Team {
  u8* arenas[kMaxRanks];  // the address of every rank's arena on this rank
  Faults faults;
  u64 timeout_ns;
  u32 user_ranks[kMaxRanks];  // the numbers of the ranks in the user's communicator, for fault records
  u32 size;
  u32 rank;
  u32 tags[kMaxRanks];  // for each rank a hash of this rank's call, in all on which the two must agree
};

// The abort word. A rank that gives up stores {operation:8, rank at fault:24, epoch:32}, which is
// never zero, in the first word of every arena. The stores here pair with the loads in load_health,
// WaitTimer::may_continue, is_aborted and end_wait. Both sides are relaxed: the word is whole, and its reader
// needs no other data. A rank does not overwrite a reason, because the first reason is nearest to
// the cause. Otherwise a rank that learns of a mismatch would replace the mismatch by the message
// that it gives up. If two ranks store at once, either may win, because each has a reason.
MPICOMM_DEVICE u64* abort_word(const Team& team, u32 owner) { return reinterpret_cast<u64*>(team.arenas[owner]); }

MPICOMM_DEVICE_CALL void raise_abort(const Team& team, const Watch& watch) {
  const u64 operation = watch.operation, peer = watch.peer, epoch = watch.sequence & 0xFFFFFFFFu;
  for (u32 rank = 0; rank < team.size; ++rank) {
    u64* const word = abort_word(team, rank);
    if (load_relaxed(word) == 0) store_relaxed(word, operation << 56 | peer << 32 | epoch);
  }
}

// Whether `word`, the abort word of this rank, says that another rank has given up. If it does,
// this rank records the same reason.
MPICOMM_DEVICE_CALL bool record_abort(const Team& team, u32 block, u64 word) {
  if (word == 0) return false;
  const u32 operation = static_cast<u32>(word >> 56), peer = static_cast<u32>(word >> 32) & 0xFFFFFFu;
  report_fault({team.faults, 0, operation, word & 0xFFFFFFFFu, block, peer}, 0);
  return true;
}

// The words that say whether a rank has given up. A kernel loads them before it checks them, so
// that these loads are in flight beside other loads.
struct Health {
  u32 failed = kClear;
  u64 abort_word = 0;
};
MPICOMM_DEVICE Health load_health(const Team& team) {
  return {load_relaxed(team.faults.failed), load_relaxed(abort_word(team, team.rank))};
}

// Whether no rank has given up, and no wait of an earlier kernel has failed on this device. After a
// failed wait this rank would compute with data that never came. So its kernel leaves, and raises
// the abort word at once, because no more data comes.
MPICOMM_DEVICE bool is_healthy(const Team& team, u32 block, const Health& health) {
  if (health.abort_word == 0 && health.failed == kClear) return true;
  if (record_abort(team, block, health.abort_word)) return false;
  raise_abort(team, {team.faults, 0, kExchange, 0, block, team.user_ranks[team.rank]});
  return false;
}

// The number of a launch. Each rank counts its launches in its arena, and all ranks count the same, so
// that a captured graph can run again for ever. Every block reads and advances a separate count, so
// no block needs to know whether the other blocks have read theirs. The number belongs to the
// communicator, but grids differ, so the blocks of a launch advance the counts of all possible
// blocks. Words of 32 bits hold the lower half of a number, which wraps around.
MPICOMM_DEVICE u64* launches_of(const Team& team) {
  return reinterpret_cast<u64*>(team.arenas[team.rank] + kNumbers);
}

// Advances the counts to `count`, with `threads` threads of each block. All threads of the block
// have read the count of the block before.
MPICOMM_DEVICE void count_launch(const Team& team, u64 count, u32 thread, u32 threads) {
  u64* const launches = launches_of(team);
  for (u32 block = blockIdx.x + thread * gridDim.x; block < kMaxBlocks; block += gridDim.x * threads) {
    launches[block] = count;
  }
}

// The announcements of `announcer` in the arena of `owner`: {launch, tag} of its last two launches,
// each in the word that the parity of the launch selects.
MPICOMM_DEVICE u64* announcements(const Team& team, u32 owner, u32 announcer) {
  return reinterpret_cast<u64*>(team.arenas[owner] + kAnnouncements) + announcer * 2;
}

// This rank's copy of its announcements to `peer`, in the same order. The next launch of this rank
// compares them with the announcements of the peer.
MPICOMM_DEVICE u64* sent_announcements(const Team& team, u32 peer) {
  return reinterpret_cast<u64*>(team.arenas[team.rank] + kSentAnnouncements) + peer * 2;
}

// Returns the announcement of `launch` to `peer`, and stores it in this rank's copy.
MPICOMM_DEVICE u64 record_announcement(const Team& team, u32 peer, u32 launch) {
  const u64 word = static_cast<u64>(launch) << 32 | team.tags[peer];
  // Relaxed, because only the next kernel of this device reads it.
  store_relaxed(sent_announcements(team, peer) + launch % 2, word);
  return word;
}

// Announces `launch` to `peer`: this rank has begun `launch`, and so has ended the launch before.
// Pairs with `load_announcements` and `check_announcement`. The store is relaxed, because the previous launch
// was another kernel. The accesses of that kernel were performed when it ended, and this launch
// publishes nothing with the word.
MPICOMM_DEVICE void announce(const Team& team, u32 peer, u32 launch) {
  store_relaxed(announcements(team, peer, team.rank) + launch % 2, record_announcement(team, peer, launch));
}

// Like `announce`, for a peer that may next touch data of this rank. The peer may read data that
// any kernel or copy wrote here before `launch`, or overwrite data that they read. Pairs with
// `acquire_announcements`, and publishes all accesses before it. The end of an earlier kernel
// orders the accesses of that kernel only for this device. After a relaxed store, the peer could
// read old data, or overwrite data while a thread still reads it.
MPICOMM_DEVICE void announce_all_before(const Team& team, u32 peer, u32 launch) {
  store_release(announcements(team, peer, team.rank) + launch % 2, record_announcement(team, peer, launch));
}

// The announcements of the last two launches of a rank. A kernel loads both, so that the loads need
// not wait for the number of this launch.
struct Announcements {
  u64 words[2];

  MPICOMM_DEVICE u32 last_launch() const {
    const u32 even = static_cast<u32>(words[0] >> 32), odd = static_cast<u32>(words[1] >> 32);
    return static_cast<i32>(even - odd) > 0 ? even : odd;  // signed, because numbers wrap around
  }
  // A choice instead of an index, because an index would put the words into memory.
  MPICOMM_DEVICE u64 of(u32 launch) const { return launch % 2 == 0 ? words[0] : words[1]; }
  // Whether two ranks announced different tags for `launch`. The result is false if a rank has
  // announced a later launch in the same word since.
  MPICOMM_DEVICE bool differ_from(const Announcements& others, u32 launch) const {
    const u64 word = of(launch), other = others.of(launch);
    return word != other && static_cast<u32>(word >> 32) == launch && static_cast<u32>(other >> 32) == launch;
  }
};

// Loads this rank's copy of its announcements to `peer`. Pairs with the stores in `record_announcement`
// by earlier launches, which have ended. Another block may be storing the word of this launch, so the caller
// uses only the other word.
MPICOMM_DEVICE Announcements load_sent_announcements(const Team& team, u32 peer) {
  const u64* const words = sent_announcements(team, peer);
  return {{load_relaxed(words), load_relaxed(words + 1)}};
}

MPICOMM_DEVICE Announcements load_announcements(const Team& team, u32 announcer) {
  const u64* const words = announcements(team, team.rank, announcer);
  return {{load_relaxed(words), load_relaxed(words + 1)}};
}

// Pairs with `announce_all_before` of `announcer`: the later accesses of the caller come after all
// accesses of `announcer` before its announcement.
MPICOMM_DEVICE Announcements acquire_announcements(const Team& team, u32 announcer) {
  // One load of both words, because each acquire delays the accesses that follow it. No order holds
  // between the two words: the word of an earlier launch may be older than the other word implies.
  // This does no harm: a peer that has gone on to a later launch has accepted the announcement of
  // this rank for the earlier launch.
  const Pair both = load_acquire(reinterpret_cast<const Pair*>(announcements(team, team.rank, announcer)));
  return {{both.first, both.second}};
}

enum Announced : u32 { kAbsent, kSame, kDifferent };

// Compares `word`, the announcement of `peer` in the word of `launch`, with the call of this rank.
MPICOMM_DEVICE Announced compare_announcement(const Team& team, u32 peer, u32 launch, u64 word) {
  const u32 announced = static_cast<u32>(word >> 32);
  // A peer that is two launches ahead has overwritten the word. It can be ahead only because it has
  // accepted the announcement of this rank for this launch.
  if (static_cast<i32>(announced - launch) < 0) return kAbsent;
  return announced != launch || static_cast<u32>(word) == team.tags[peer] ? kSame : kDifferent;
}
MPICOMM_DEVICE Announced check_announcement(const Team& team, u32 peer, u32 launch) {
  return compare_announcement(team, peer, launch, load_relaxed(announcements(team, team.rank, peer) + launch % 2));
}

// Gives up because `peer` made another call than this rank in `launch`. Returns false.
MPICOMM_DEVICE_CALL bool report_mismatch(const Team& team, u32 peer, u32 launch) {
  const Watch mismatch{team.faults, 0, kMismatch, launch, blockIdx.x, team.user_ranks[peer]};
  report_fault(mismatch, 0);
  raise_abort(team, mismatch);
  return false;
}

// The time that a wait for ranks has lasted. The waiting thread reads the clock only if the wait
// lasts long. All this code is out of line, so that the polling loops stay short.
struct WaitTimer {
  u64 start = 0;
  u64 next_check = 0;

  // Whether to go on waiting for the ranks in `missing`, which is not empty. If the result is
  // false, the kernel must leave: time is up, a missing rank makes another call, or another rank
  // has given up.
  MPICOMM_DEVICE_CALL bool may_continue(const Team& team, u32 launch, u32 missing) {
    const u64 now = clock_ns();
    if (start == 0) start = next_check = now;
    if (now < next_check) return true;
    next_check = now + kCheckEvery_ns;
    if (record_abort(team, blockIdx.x, load_relaxed(abort_word(team, team.rank)))) return false;
    Watch watch{team.faults, team.timeout_ns, kExchange, launch, blockIdx.x, 0};
    u64 elapsed = now - start;
    bool over = elapsed > team.timeout_ns;
    for (u32 peer = team.size; peer-- > 0;) {
      if (!(missing >> peer & 1)) continue;
      watch.peer = team.user_ranks[peer];
      if (check_announcement(team, peer, launch) == kDifferent) {
        watch.operation = kMismatch;
        elapsed = 0;
        over = true;
        break;
      }
    }
    if (!over) return true;
    report_fault(watch, elapsed);
    raise_abort(team, watch);
    return false;
  }
};

// Waits until `absent` returns an empty set of ranks. If the result is false, the kernel must
// leave.
template <class Absent>
MPICOMM_DEVICE bool await_ranks(const Team& team, u32 launch, Absent absent) {
  WaitTimer timer;
  for (u32 polls = 0;; ++polls) {
    const u32 missing = absent();
    if (missing == 0) return true;
    if (polls >= kPollsBeforeClock && !timer.may_continue(team, launch, missing)) return false;
  }
}

}  // namespace mpicomm
