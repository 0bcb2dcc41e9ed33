#include "landing.h"

#include <algorithm>
#include <utility>

#include "afd_comm/process.h"
#include "afd_comm/types.h"

namespace afd_comm {
namespace {

constexpr uint64_t kLandingChunk = 256 << 10;
constexpr int64_t kStuckUs = 10000000;

}  // namespace

void wait_copied(Accelerator& accelerator, Event event) {
  if (accelerator.done(event)) return;
  const uint64_t deadline = deadline_after_us(kStuckUs);
  while (!accelerator.done(event)) {
    if (now_ns() >= deadline)
      throw CommError(device_text(accelerator.device()) +
                      " did not copy a received message in 10 s; look for the first error of the "
                      "device, and restart the process");
    relax();
  }
}

Landing::Landing(std::shared_ptr<Accelerator> accelerator)
    : accelerator_(std::move(accelerator)),
      buffer_(accelerator_, kWindow * kLandingChunk),
      stream_(accelerator_->make_copy_stream()) {
  for (Event& event : copied_) event = accelerator_->make_event(false);
}

Landing::~Landing() {
  try {
    finish();
  } catch (const CommError&) {
  }
  for (const Event event : copied_) accelerator_->destroy_event(event);
  accelerator_->destroy_stream(stream_);
}

Landing::Room Landing::room() {
  if (filled_ == 0) wait(copied_[now_]);
  return {buffer_.host() + now_ * kLandingChunk + filled_, kLandingChunk - filled_};
}

void Landing::arrived(void* to, uint64_t n) {
  if (filled_ == 0) to_ = static_cast<uint8_t*>(to);
  filled_ += n;
  if (filled_ == kLandingChunk) flush();
}

void Landing::flush() {
  if (filled_ == 0) return;
  accelerator_->copy(stream_, to_, buffer_.for_device(buffer_.host() + now_ * kLandingChunk),
                     filled_, CopyPath::Any);
  accelerator_->record(copied_[now_], stream_);
  now_ = (now_ + 1) % kWindow;
  filled_ = 0;
  dirty_ = true;
}

void Landing::finish() {
  if (!dirty_) return;
  // The copies of one stream end in order.
  wait(copied_[(now_ + kWindow - 1) % kWindow]);
  dirty_ = false;
}

void Landing::wait(Event event) { wait_copied(*accelerator_, event); }

}  // namespace afd_comm
