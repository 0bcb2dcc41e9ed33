#include "afd_comm/guard.h"

#include <time.h>

#include <algorithm>
#include <utility>

namespace afd_comm {
namespace {

// Pause between two looks at the stream, and between two flags of a released slot. Much shorter
// than a deadline, longer than a stream needs to see a flag.
constexpr uint64_t kLookNs = 20000;
// Pause between two checks with the kernel whether the writers are alive.
constexpr uint64_t kWriterNs = 5000000;
// If a stream is busy this long after its waits were released, it waits for something else.
constexpr uint64_t kStuckNs = 10000000000;

void nap(uint64_t ns) {
  const timespec pause{0, static_cast<long>(ns)};
  nanosleep(&pause, nullptr);
}

}  // namespace

Guard::Guard(Region& region, Stream stream, std::vector<Awaited> awaited)
    : region_(region), awaited_(std::move(awaited)) {
  for (Awaited& a : awaited_) {
    a.status = Status::Ok;
    auto due =
        std::find_if(due_.begin(), due_.end(), [&](const Due& d) { return d.slot == a.slot; });
    if (due == due_.end()) due = due_.insert(due_.end(), Due{a.slot, {}});
    if (std::find(due->flags.begin(), due->flags.end(), a.flag) == due->flags.end())
      due->flags.push_back(a.flag);
  }
  Accelerator& accelerator = region_.accelerator();
  event_ = accelerator.make_event(false);
  accelerator.record(event_, stream);
}

Guard::~Guard() { region_.accelerator().destroy_event(event_); }

bool Guard::done() const { return region_.accelerator().done(event_); }

void Guard::release(Due& due, Status status) {
  if (due.status != Status::Ok) return;
  due.status = status;
  // The stream awaits the flags in order, so it waits for the flag after the one that the doorbell
  // shows.
  for (std::size_t i = 0; i + 1 < due.flags.size(); ++i)
    if (region_.ready(due.slot, due.flags[i])) due.next = i + 1;
}

void Guard::ring_released() {
  for (Due& due : due_) {
    if (due.status == Status::Ok) continue;
    region_.set_doorbell(due.slot, due.flags[due.next]);
    due.next = (due.next + 1) % due.flags.size();
  }
}

void Guard::finish() {
  for (Due& due : due_) {
    if (due.status == Status::Ok) continue;
    // The released flag must not satisfy a later wait.
    region_.set_doorbell(due.slot, 0);
    for (Awaited& a : awaited_)
      if (a.slot == due.slot) a.status = due.status;
  }
}

bool Guard::wait(uint64_t deadline, Interrupt interrupt) {
  uint64_t next_writer = now_ns() + kWriterNs;
  while (!done()) {
    const uint64_t now = now_ns();
    if (now >= next_writer) {
      next_writer = now + kWriterNs;
      for (Due& due : due_)
        if (region_.gone(due.slot)) release(due, Status::PeerGone);
      if (interrupt != nullptr && interrupt()) return true;
    }
    if (now >= deadline) {
      // All flags: a doorbell of the last replay looks like one of this replay.
      for (Due& due : due_) release(due, Status::Deadline);
      if (now >= deadline + kStuckNs)
        throw CommError(
            "a stream of region '" + region_.name() +
            "' did not finish although its waits were released; other work on it hangs: "
            "restart the process");
    }
    ring_released();
    nap(kLookNs);
  }
  finish();
  return false;
}

}  // namespace afd_comm
