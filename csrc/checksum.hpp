// The checksum of messages: CRC32C (Castagnoli; RFC 3720, appendix B.4), which finds every flip of a bit.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradwire {

// Of these bytes, after those whose checksum is `before`; 0 before the first.
uint32_t crc32c(uint32_t before, const void* bytes, size_t count);

}  // namespace gradwire
