// The clock of a message's Times.
#pragma once

#include <cstdint>

namespace afd_comm {

// CLOCK_MONOTONIC in ns, up to some 10 ns, and never backwards in one thread. Where the kernel keeps
// that clock by the CPU's time stamp counter this is read directly, which takes 10 ns instead of 24,
// and compared with the clock every millisecond.
uint64_t trace_now_ns();

}  // namespace afd_comm
