#include "copy_counter.h"

#include <algorithm>
#include <utility>

#include "afd_comm/process.h"
#include "afd_comm/types.h"

namespace afd_comm {
namespace {

constexpr int64_t kStuckUs = 10000000;

}  // namespace

CopyCounter::CopyCounter(std::shared_ptr<Accelerator> accelerator, std::size_t window)
    : accelerator_(std::move(accelerator)), events_(window) {
  for (Event& event : events_) event = accelerator_->make_event(false);
}

CopyCounter::~CopyCounter() {
  for (const Event event : events_) accelerator_->destroy_event(event);
}

uint64_t CopyCounter::enqueue(Stream stream) {
  accelerator_->record(events_[(enqueued_ + 1) % events_.size()], stream);
  return ++enqueued_;
}

bool CopyCounter::reached(uint64_t count) {
  if (count > reached_ && accelerator_->done(events_[count % events_.size()])) reached_ = count;
  return count <= reached_;
}

void CopyCounter::wait(uint64_t count) {
  if (reached(count)) return;
  const uint64_t deadline = deadline_after_us(kStuckUs);
  while (!reached(count)) {
    if (now_ns() >= deadline)
      throw CommError(device_text(accelerator_->device()) +
                      " did not copy a message in 10 s; look for the first error of the device, "
                      "and restart the process");
    relax();
  }
}

}  // namespace afd_comm
