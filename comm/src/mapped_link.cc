#include "mapped_link.h"

#include <unistd.h>

#include <utility>

#include "packed_times.h"

namespace afd_comm {
namespace {

// Interval at which posts ask the kernel whether the receiver is alive; rare enough to cost
// nothing.
constexpr uint64_t kAliveNs = 1000000;

}  // namespace

MappedLink::MappedLink(Memory memory, const LinkOptions& options)
    : Link(options.trace),
      memory_(std::move(memory)),
      slots_(options.slots),
      creator_(getpid()),
      same_clock_(memory_.head().clock == clock_identity()),
      receiver_(memory_.head().owner) {
  if (!receiver_.alive() || memory_.head().closed.load(std::memory_order_acquire) != 0)
    throw CommError(
        "the region's process has ended or closed it; restart it and connect to its new address");
  const uint64_t deadline = deadline_after_us(options.timeout_us);
  serial_ = take_claim(memory_, slots_, identify_process(creator_), memory_.fd().get(), deadline);
  memory_.close_fd();
}

void MappedLink::close() {
  if (closed_.exchange(true, std::memory_order_acq_rel)) return;
  // A forked child's copy of this object must not end its parent's claim.
  if (getpid() == creator_ && slots_.count != 0) end_claim(memory_, slots_, serial_);
}

void MappedLink::describe(SlotControl& control, const Message& m, bool trace, uint64_t posted,
                          uint64_t arrived) const {
  const auto begin = static_cast<int64_t>(posted), end = static_cast<int64_t>(arrived);
  Header header = m.header;
  header.traced = kNotTraced;
  if (trace && !(same_clock_ && pack_times(header, begin, end, m.echo))) {
    control.times = times_of(m, posted);
    control.times.sent = control.times.arrived = end;
    header.traced = kTimesInLine;
  }
  control.header = header;
}

Status MappedLink::check(const Message& m, uint64_t now) {
  if (closed_.load(std::memory_order_acquire)) return Status::Closed;
  const Geometry& g = memory_.geometry();
  const Status checked = check_message(m, g.slots, g.slot_bytes, slots_);
  if (checked != Status::Ok) return checked;
  if (!receiver_alive(now)) return Status::PeerGone;
  return owns(m.slot) ? Status::Ok : Status::Closed;
}

bool MappedLink::receiver_alive(uint64_t now) {
  if (memory_.head().closed.load(std::memory_order_acquire) != 0) return false;
  if (receiver_ended_.load(std::memory_order_relaxed)) return false;
  if (now == 0) now = coarse_now_ns();
  if (now - last_look_.load(std::memory_order_relaxed) < kAliveNs) return true;
  last_look_.store(now, std::memory_order_relaxed);
  if (receiver_.alive()) return true;
  receiver_ended_.store(true, std::memory_order_relaxed);
  return false;
}

}  // namespace afd_comm
