// The clock of a message's Times.
#pragma once

#include <cstdint>

namespace afd_comm {

// CLOCK_MONOTONIC in ns, accurate to some 10 ns, never decreasing within a thread. If the kernel's
// clock is the CPU's time stamp counter, that is read directly, which takes 10 ns instead of 24. It
// is compared with the clock every millisecond.
uint64_t trace_now_ns();

}  // namespace afd_comm
