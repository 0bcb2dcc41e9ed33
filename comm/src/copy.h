// Copies into memory that another core reads next.
#pragma once

#include <cstddef>

namespace afd_comm {

// Like memcpy. Copies too large for the caches bypass them.
void copy(void* to, const void* from, std::size_t nbytes);

// Like memcpy, but always bypasses the caches if the CPU can. A thread that sees a later release
// store also sees all of the copy.
void stream_copy(void* to, const void* from, std::size_t nbytes);

}  // namespace afd_comm
