// The checksum of messages: CRC32C (Castagnoli; RFC 3720, appendix B.4), which finds every flip of a bit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "api.hpp"

namespace gradwire {

// Of these bytes, after those whose checksum is `before`; 0 before the first.
uint32_t crc32c(uint32_t before, const void* bytes, size_t count);

// What an encoder computes on its way. Without `along` where this processor is no faster at that than in a pass of its own.
Summing summing();

// The checksum of a payload of so many bytes, whose encoder has computed that of its codes as far as it came.
uint32_t checksum_of(const Summing& sum, const void* payload, size_t count);

// What an encode wrote, and its checksum.
struct Encoded {
  const void* payload;  // nullptr: nothing
  size_t count;
  uint32_t checksum;
};

// Where an encode on this thread puts that. nullptr: nobody asks.
extern thread_local Encoded* asked;

// Calls encode(what it may sum with, or nullptr) for this payload.
template <class Encode>
void encode_and_sum(const Tensor& payload, const Encode& encode) {
  Summing sum = summing();
  if (!asked || !sum.along) return encode(nullptr);
  encode(&sum);
  *asked = {payload.data, size_t(payload.numel), checksum_of(sum, payload.data, size_t(payload.numel))};
}

}  // namespace gradwire
