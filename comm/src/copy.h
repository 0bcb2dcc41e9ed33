// Copying into memory that another core reads next.
#pragma once

#include <cstddef>

namespace afd_comm {

// As memcpy. Copies that would only push each other out of the caches go around them.
void copy(void* to, const void* from, std::size_t nbytes);

// As memcpy, always around the caches where the CPU can. All of it is visible to whoever sees a
// later release store.
void stream_copy(void* to, const void* from, std::size_t nbytes);

}  // namespace afd_comm
