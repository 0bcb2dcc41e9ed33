// Packs the times of a message into spare words of its header, for processes that share a clock. A
// separate line for times would be one more cache line to move between two cores, which takes as
// long as the message itself.
#pragma once

#include <cstdint>

#include "afd_comm/memory.h"

namespace afd_comm {

// Header::traced.
constexpr uint32_t kNotTraced = 0;
constexpr uint32_t kTimesInLine = 1;  // SlotControl::times belongs to this message
constexpr uint32_t kTimesPacked = 1u
                                  << 31;  // lower bits: 0, or 1 + the echo's arrived - posted in ns

// Returns false if the times do not fit, i.e. if they are seconds apart. `arrived` also serves as
// the time sent.
inline bool pack_times(Header& header, int64_t posted, int64_t arrived, const Echo& echo) {
  const int64_t took = arrived - posted;
  const int64_t way = echo.posted != 0 ? echo.arrived - echo.posted : -1;
  const bool answers = echo.posted != 0;
  if (took < 0 || took > int64_t{UINT32_MAX}) return false;
  if (answers && (way < 0 || way >= int64_t{kTimesPacked} - 1)) return false;
  header.traced = kTimesPacked | static_cast<uint32_t>(way + 1);
  header.took = static_cast<uint32_t>(took);
  header.posted = posted;
  return true;
}

// Returns the times of the slot's message, without `consumed`; zeros if it has none. `clock`: this
// process's clock_identity().
inline Times read_times(const SlotControl& control, uint64_t clock) {
  const Header& header = control.header;
  if (header.traced == kNotTraced) return Times{};
  if ((header.traced & kTimesPacked) == 0) return control.times;
  Times times;
  times.posted = header.posted;
  times.sent = times.arrived = header.posted + header.took;
  times.clock = clock;
  if (const uint32_t way = header.traced & ~kTimesPacked; way != 0) {
    // With one clock only the difference of the echo's times matters.
    times.echo_arrived = header.posted;
    times.echo_posted = header.posted - (int64_t{way} - 1);
  }
  return times;
}

}  // namespace afd_comm
