// A ring of bytes in memory that two processes share: one of them writes, the other one reads, neither takes a lock.
//
// Whoever has nothing to do tells at which position of the other one it goes on, looks once more, and sleeps until its bell rings:
// an eventfd, so that the same poll also notices a connection that closes.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>

namespace gradwire {

// Twin of the layout in src/gradwire/transport/rings.py: the bytes follow. Positions count bytes since the beginning. New memory
// is zero: an empty ring in which nobody waits. The capacity is not here, so that nothing in this memory leads out of it.
struct Ring {
  alignas(64) std::atomic<uint64_t> written;
  std::atomic<uint64_t> reader_wakes_at;  // when so much is written; 0: the reader does not wait
  alignas(64) std::atomic<uint64_t> read;
  std::atomic<uint64_t> writer_wakes_at;  // when so much is read; 0: the writer does not wait

  char* bytes() { return reinterpret_cast<char*>(this + 1); }
};
static_assert(sizeof(Ring) == 128 && std::atomic<uint64_t>::is_always_lock_free, "processes share this");

// Bytes that are copied before the other side may have them: both then copy at once, and whoever sums them finds them in the nearest
// cache.
constexpr uint64_t kRingStep = 1 << 15;

// After a change of `position`. No wake is lost: this side changes the position and then looks whether it is due, the other side
// tells and then looks at the position (Phase::prepare_wait), and all four of these are in one order.
inline void wake_if_due(std::atomic<uint64_t>& wakes_at, uint64_t position, int bell) {
  const uint64_t due = wakes_at.load(std::memory_order_seq_cst);
  if (!due || position < due || !wakes_at.exchange(0, std::memory_order_relaxed)) return;
  const uint64_t one = 1;
  while (write(bell, &one, sizeof one) < 0 && errno == EINTR) {
  }
}

// Writes at most one step of these bytes, as far as there is room; how much that was. `bell`: the reader's.
inline uint64_t put(Ring& ring, uint64_t capacity, int bell, const char* from, uint64_t count) {
  const uint64_t at = ring.written.load(std::memory_order_relaxed), place = at % capacity;
  const uint64_t filled = std::min(at - ring.read.load(std::memory_order_acquire), capacity);
  const uint64_t step = std::min({count, capacity - filled, capacity - place, kRingStep});
  if (!step) return 0;
  std::memcpy(ring.bytes() + place, from, step);
  ring.written.store(at + step, std::memory_order_seq_cst);
  wake_if_due(ring.reader_wakes_at, at + step, bell);
  return step;
}

// Reads at most one step of what is there; how much that was. `bell`: the writer's.
inline uint64_t take(Ring& ring, uint64_t capacity, int bell, char* into, uint64_t count) {
  const uint64_t at = ring.read.load(std::memory_order_relaxed), place = at % capacity;
  const uint64_t filled = std::min(ring.written.load(std::memory_order_acquire) - at, capacity);
  const uint64_t step = std::min({count, filled, capacity - place, kRingStep});
  if (!step) return 0;
  std::memcpy(into, ring.bytes() + place, step);
  ring.read.store(at + step, std::memory_order_seq_cst);
  wake_if_due(ring.writer_wakes_at, at + step, bell);
  return step;
}

}  // namespace gradwire
