// What every kernel of a communicator knows, and the head of every rank's arena: how ranks count their launches, tell
// each other what they are in, and give up together.
#pragma once

#include "bytes.cuh"
#include "faults.cuh"

namespace mpicomm {

// The host's copies of these constants and of Team are in team.py; a test compares them.
constexpr u32 kMaxRanks = 8;
constexpr u32 kMaxBlocks = 256;
constexpr u64 kAnnouncements = kLineNbytes;  // where they begin in an arena; the abort word lies before them
constexpr u64 kSaid = kAnnouncements + kMaxRanks * 2 * sizeof(u64);
constexpr u64 kNumbers = kSaid + kMaxRanks * 2 * sizeof(u64);
constexpr u64 kHeadNbytes = kNumbers + kMaxBlocks * sizeof(u64);

struct Team {
  u8* arenas[kMaxRanks];  // every rank's, as mapped here
  Faults faults;
  u64 timeout_ns;
  u32 names[kMaxRanks];  // the ranks as the user's communicator counts them, for records
  u32 size;
  u32 rank;
  u32 tags[kMaxRanks];  // hashes of what this rank calls, each with what it and that rank are to agree on
};

// A rank that gives up says so in the first word of every arena: {operation:8, rank at fault:24, epoch:32}, never zero.
// Relaxed on both sides: the word is whole and says everything. The first writer's stays, as its reason is nearest to the
// cause: a rank that was told of a mismatch would otherwise write over it that it has given up. Of two at once any may
// win, each has a reason.
MPICOMM_DEVICE u64* abort_word(const Team& team, u32 owner) { return reinterpret_cast<u64*>(team.arenas[owner]); }

MPICOMM_DEVICE_CALL void raise_abort(const Team& team, const Watch& watch) {
  const u64 operation = watch.operation, peer = watch.peer, epoch = watch.sequence & 0xFFFFFFFFu;
  for (u32 rank = 0; rank < team.size; ++rank) {
    u64* const word = abort_word(team, rank);
    if (load_relaxed(word) == 0) store_relaxed(word, operation << 56 | peer << 32 | epoch);
  }
}

// Records here what another rank has said in this one's abort word, if one has.
MPICOMM_DEVICE_CALL bool heed_abort(const Team& team, u32 block, u64 word) {
  if (word == 0) return false;
  const u32 operation = static_cast<u32>(word >> 56), peer = static_cast<u32>(word >> 32) & 0xFFFFFFu;
  report_fault({team.faults, 0, operation, word & 0xFFFFFFFFu, block, peer}, 0);
  return true;
}

// What says whether somebody has given up. Loaded by itself, so that the loads are under way beside others.
struct Health {
  u32 failed = kClear;
  u64 abort_word = 0;
};
MPICOMM_DEVICE Health load_health(const Team& team) {
  return {load_relaxed(team.faults.failed), load_relaxed(abort_word(team, team.rank))};
}

// Whether nobody has given up, and no wait of another kernel has failed here. What is computed after such a failure is
// not what it should be; the others learn at once that nothing more comes.
MPICOMM_DEVICE bool is_healthy(const Team& team, u32 block, const Health& health) {
  if (health.abort_word == 0 && health.failed == kClear) return true;
  if (heed_abort(team, block, health.abort_word)) return false;
  raise_abort(team, {team.faults, 0, kExchange, 0, block, team.names[team.rank]});
  return false;
}

// Launches are counted, alike on all ranks, in the arena: a captured graph can be replayed for ever. Every block reads
// a count of its own and the blocks of a launch advance those of all possible blocks, as grids differ: the number
// belongs to the communicator, and no block needs to know whether the others have read it. Words of 32 bits take the
// lower half of a number, which comes again.
MPICOMM_DEVICE u64* launches_of(const Team& team) {
  return reinterpret_cast<u64*>(team.arenas[team.rank] + kNumbers);
}

// Advances them, with `threads` threads of each block, once all of the block have read its number.
MPICOMM_DEVICE void count_launch(const Team& team, u64 count, u32 thread, u32 threads) {
  u64* const launches = launches_of(team);
  for (u32 block = blockIdx.x + thread * gridDim.x; block < kMaxBlocks; block += gridDim.x * threads) {
    launches[block] = count;
  }
}

// What `announcer` says in `owner`'s arena of its last two launches: {launch, tag}, each at the place of its parity.
MPICOMM_DEVICE u64* announcements(const Team& team, u32 owner, u32 announcer) {
  return reinterpret_cast<u64*>(team.arenas[owner] + kAnnouncements) + announcer * 2;
}

// What this rank has said to `peer` of its own, likewise: its next launch compares that with what the peer says.
MPICOMM_DEVICE u64* said(const Team& team, u32 peer) {
  return reinterpret_cast<u64*>(team.arenas[team.rank] + kSaid) + peer * 2;
}

// Notes what this rank says to `peer` of `launch` and returns it.
MPICOMM_DEVICE u64 say(const Team& team, u32 peer, u32 launch) {
  const u64 word = static_cast<u64>(launch) << 32 | team.tags[peer];
  store_relaxed(said(team, peer) + launch % 2, word);  // for this device alone, and the next kernel
  return word;
}

// Tells `peer` that `launch` has begun here, and hence that the one before is over. Relaxed: that one was another
// kernel, whose accesses were performed when it ended, and nothing of this one is published.
MPICOMM_DEVICE void announce(const Team& team, u32 peer, u32 launch) {
  store_relaxed(announcements(team, peer, team.rank) + launch % 2, say(team, peer, launch));
}

// As `announce`, where the peer may go on to read what was written before `launch`, by whatever kernel or copy, or write
// what was read. Pairs with `acquire_announcements` and publishes all that. That an earlier kernel is over says so to
// this device alone.
MPICOMM_DEVICE void announce_all_before(const Team& team, u32 peer, u32 launch) {
  store_release(announcements(team, peer, team.rank) + launch % 2, say(team, peer, launch));
}

// What a rank has said of its last two launches: both, so as not to wait for the number of this one.
struct Announcements {
  u64 words[2];

  MPICOMM_DEVICE u32 last_launch() const {
    const u32 even = static_cast<u32>(words[0] >> 32), odd = static_cast<u32>(words[1] >> 32);
    return static_cast<i32>(even - odd) > 0 ? even : odd;  // signed, as numbers wrap
  }
  // Chosen, not indexed, which would put the words into memory.
  MPICOMM_DEVICE u64 of(u32 launch) const { return launch % 2 == 0 ? words[0] : words[1]; }
  // Whether two ranks say different things of `launch`; false where one of them has gone on since.
  MPICOMM_DEVICE bool differ_from(const Announcements& others, u32 launch) const {
    const u64 word = of(launch), other = others.of(launch);
    return word != other && static_cast<u32>(word >> 32) == launch && static_cast<u32>(other >> 32) == launch;
  }
};

// What this rank has said to `peer`. Pairs with the stores in `say`, of earlier launches, which are over; the word of this
// one, which another block may be writing, is the other of the two.
MPICOMM_DEVICE Announcements load_said(const Team& team, u32 peer) {
  const u64* const words = said(team, peer);
  return {{load_relaxed(words), load_relaxed(words + 1)}};
}

MPICOMM_DEVICE Announcements load_announcements(const Team& team, u32 announcer) {
  const u64* const words = announcements(team, team.rank, announcer);
  return {{load_relaxed(words), load_relaxed(words + 1)}};
}

// Pairs with `announce_all_before` of that rank: what it did before is seen by the caller's accesses after this.
MPICOMM_DEVICE Announcements acquire_announcements(const Team& team, u32 announcer) {
  // At once, as each acquire holds up what follows it. The halves are in no order: that of an earlier launch may be
  // older than the other says. Who has gone on to another launch was content with what this rank said of that one.
  const Pair both = load_acquire(reinterpret_cast<const Pair*>(announcements(team, team.rank, announcer)));
  return {{both.first, both.second}};
}

enum Announced : u32 { kAbsent, kSame, kDifferent };

// What `peer` has said of `launch`, in the word for that.
MPICOMM_DEVICE Announced judge(const Team& team, u32 peer, u32 launch, u64 word) {
  const u32 said = static_cast<u32>(word >> 32);
  // A peer that is two ahead has written over it: it cannot be, unless it was content with this launch.
  if (static_cast<i32>(said - launch) < 0) return kAbsent;
  return said != launch || static_cast<u32>(word) == team.tags[peer] ? kSame : kDifferent;
}
MPICOMM_DEVICE Announced look_at(const Team& team, u32 peer, u32 launch) {
  return judge(team, peer, launch, load_relaxed(announcements(team, team.rank, peer) + launch % 2));
}

// Gives up, as `peer` was in another call than this rank in `launch`.
MPICOMM_DEVICE_CALL bool refuse(const Team& team, u32 peer, u32 launch) {
  const Watch mismatch{team.faults, 0, kMismatch, launch, blockIdx.x, team.names[peer]};
  report_fault(mismatch, 0);
  raise_abort(team, mismatch);
  return false;
}

// How long a wait has lasted, looked at only when it lasts long: kept out of the loops, which stay short that way.
struct Patience {
  u64 start = 0;
  u64 next_look = 0;

  // Whether to go on waiting for the ranks of a set, of which there is one at least. If not, the kernel must leave:
  // time is up, a rank that is waited for is in something else, or another rank has given up.
  MPICOMM_DEVICE_CALL bool lasts(const Team& team, u32 launch, u32 missing) {
    const u64 now = clock_ns();
    if (start == 0) start = next_look = now;
    if (now < next_look) return true;
    next_look = now + kLookEvery_ns;
    if (heed_abort(team, blockIdx.x, load_relaxed(abort_word(team, team.rank)))) return false;
    Watch watch{team.faults, team.timeout_ns, kExchange, launch, blockIdx.x, 0};
    u64 elapsed = now - start;
    bool over = elapsed > team.timeout_ns;
    for (u32 peer = team.size; peer-- > 0;) {
      if (!(missing >> peer & 1)) continue;
      watch.peer = team.names[peer];
      if (look_at(team, peer, launch) == kDifferent) {
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

// Waits until `absent` returns an empty set of ranks. False means that the kernel must leave.
template <class Absent>
MPICOMM_DEVICE bool await_ranks(const Team& team, u32 launch, Absent absent) {
  Patience patience;
  for (u32 polls = 0;; ++polls) {
    const u32 missing = absent();
    if (missing == 0) return true;
    if (polls >= kPollsBeforeClock && !patience.lasts(team, launch, missing)) return false;
  }
}

}  // namespace mpicomm
