// put and get: copies to a peer, and from a peer.
#pragma once

#include "../../bytes.cuh"
#include "groups.cuh"

namespace mpicomm {

// Returns the address on this rank of the part of `rank` of a SymmetricArray; null for ranks of
// other nodes. `pointers` is the address of the array that `SymmetricArray.pointers` returns.
template <class T>
MPICOMM_DEVICE T* part(const u64* pointers, u32 rank) {
  return reinterpret_cast<T*>(pointers[rank]);
}

// Copies `nbytes` to the memory of a peer. Addresses and length may be any. The two ranges may not
// overlap. If both addresses have the same remainder modulo 16, all accesses except the first and
// the last move 16 bytes. Otherwise the stores move 16 bytes, and the loads are narrower.
//
// Orders: the copy reads `from` after all stores that threads of the group made before the call. It
// publishes nothing; a later `signal` of the same group publishes the copy. After a group.sync()
// the caller may write `from` again. Callers: all threads of the group. Timeout: it waits for no
// other rank.
template <class Group>
MPICOMM_DEVICE void put(Group group, void* to, const void* from, u64 nbytes) {
  group.sync();  // a thread copies bytes that other threads of the group may have stored
  copy_bytes<Wide::kStores, kPacketNbytes>(
      static_cast<u8*>(to), static_cast<const u8*>(from), nbytes, group.number(), group.size());
}

// Copies `nbytes` from the memory of a peer. It is like `put`, but if the addresses differ modulo
// 16, its loads move 16 bytes and its stores are narrower.
//
// Orders: all threads of the group may read `to` after the call. Before the call, the caller must
// have learned from `wait` or `barrier` that the peer has written `from`. After the call, a
// `signal` of the same group tells the peer that it may write `from` again. Callers: all threads of
// the group. Timeout: it waits for no other rank.
template <class Group>
MPICOMM_DEVICE void get(Group group, void* to, const void* from, u64 nbytes) {
  copy_bytes<Wide::kLoads, kPacketNbytes>(
      static_cast<u8*>(to), static_cast<const u8*>(from), nbytes, group.number(), group.size());
  group.sync();  // without it a thread could read bytes of `to` that another thread has not copied yet
}

}  // namespace mpicomm
