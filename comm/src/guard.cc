#include "afd_comm/guard.h"

#include <algorithm>
#include <utility>

#include "stream_watch.h"

namespace afd_comm {

Guard::Guard(Region& region, Stream stream, std::vector<Awaited> awaited, Hold* hold)
    : region_(region), awaited_(std::move(awaited)), hold_(hold) {
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
  if (hold_ != nullptr) step_ = hold_->enqueue(stream);
}

Guard::~Guard() { region_.accelerator().destroy_event(event_); }

bool Guard::done() const { return region_.accelerator().done(event_); }

// Returns false if the stream is done with the step: its peers rang all doorbells in time.
bool Guard::withhold() {
  if (hold_ == nullptr || withheld_) return true;
  return withheld_ = hold_->close(step_);
}

void Guard::release(Due& due, Status status) {
  if (due.status != Status::Ok || !withhold()) return;
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
