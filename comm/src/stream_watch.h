// How the CPU looks after a stream that waits for flags.
#pragma once

#include <cstdint>

namespace afd_comm {

// Pause between two looks at the stream, and between two flags of a released slot. Much shorter
// than a deadline, longer than a stream needs to see a flag.
constexpr uint64_t kLookNs = 20000;
// Pause between two checks with the kernel whether the writers are alive.
constexpr uint64_t kWriterNs = 5000000;
// If a stream is busy this long after its waits were released, it waits for something else.
constexpr uint64_t kStuckNs = 10000000000;

}  // namespace afd_comm
