// CRC32C (Castagnoli, polynomial 0x1EDC6F41 reflected), as in RFC 3720 appendix B.4.
#pragma once
#include <cstddef>
#include <cstdint>

namespace offloadz {
uint32_t crc32c(const void *data, size_t num_bytes);
}
