// A ring of bytes in memory that two processes share: one of them writes, the other one reads, neither takes a lock.
//
// Whoever has nothing to do tells at which position of the other one it goes on, looks once more, and sleeps until its bell rings:
// an eventfd, so that the same poll also hears of a connection that closes.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>

namespace gradwire {

// Twin of the layout in src/gradwire/collectives/rings.py. Positions count bytes since the beginning. New memory is zero: an empty
// ring in which nobody waits.
struct Ring {
  alignas(64) std::atomic<uint64_t> written;
  std::atomic<uint64_t> reader_wakes_at;  // when so much is written; 0: the reader does not wait
  alignas(64) std::atomic<uint64_t> read;
  std::atomic<uint64_t> writer_wakes_at;  // when so much is read; 0: the writer does not wait
  alignas(64) uint64_t capacity;

  char* bytes() { return reinterpret_cast<char*>(this + 1); }
};
static_assert(sizeof(Ring) == 192 && std::atomic<uint64_t>::is_always_lock_free, "processes share this");

// Bytes that are copied before the other side may have them: both then copy at once, and whoever sums them finds them in the nearest
// cache.
constexpr uint64_t kRingStep = 1 << 15;

inline void wake_if_due(std::atomic<uint64_t>& wakes_at, uint64_t position, int bell) {
  std::atomic_thread_fence(std::memory_order_seq_cst);  // beside the one between telling and looking once more
  const uint64_t due = wakes_at.load(std::memory_order_relaxed);
  if (!due || position < due || !wakes_at.exchange(0, std::memory_order_relaxed)) return;
  const uint64_t one = 1;
  while (write(bell, &one, sizeof one) < 0 && errno == EINTR) {
  }
}

// Writes at most one step of these bytes, as far as there is room; how much that was. `bell`: the reader's.
inline uint64_t put(Ring& ring, int bell, const char* from, uint64_t count) {
  const uint64_t at = ring.written.load(std::memory_order_relaxed), place = at % ring.capacity;
  const uint64_t filled = std::min(at - ring.read.load(std::memory_order_acquire), ring.capacity);
  const uint64_t step = std::min({count, ring.capacity - filled, ring.capacity - place, kRingStep});
  if (!step) return 0;
  std::memcpy(ring.bytes() + place, from, step);
  ring.written.store(at + step, std::memory_order_release);
  wake_if_due(ring.reader_wakes_at, at + step, bell);
  return step;
}

// Reads at most one step of what is there; how much that was. `bell`: the writer's.
inline uint64_t take(Ring& ring, int bell, char* into, uint64_t count) {
  const uint64_t at = ring.read.load(std::memory_order_relaxed), place = at % ring.capacity;
  const uint64_t filled = std::min(ring.written.load(std::memory_order_acquire) - at, ring.capacity);
  const uint64_t step = std::min({count, filled, ring.capacity - place, kRingStep});
  if (!step) return 0;
  std::memcpy(into, ring.bytes() + place, step);
  ring.read.store(at + step, std::memory_order_release);
  wake_if_due(ring.writer_wakes_at, at + step, bell);
  return step;
}

}  // namespace gradwire
