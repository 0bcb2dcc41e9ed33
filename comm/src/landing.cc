#include "landing.h"

#include <algorithm>
#include <utility>

#include "afd_comm/types.h"

namespace afd_comm {
Landing::Landing(std::shared_ptr<Accelerator> accelerator)
    : accelerator_(std::move(accelerator)),
      buffer_(accelerator_, kWindow * kStageChunk),
      stream_(accelerator_->make_copy_stream()),
      copied_(accelerator_, kWindow) {}

Landing::~Landing() {
  try {
    finish();
  } catch (const CommError&) {
  }
  accelerator_->destroy_stream(stream_);
}

Landing::Room Landing::room() {
  if (filled_ == 0) copied_.wait(free_at_[now_]);
  return {buffer_.host() + now_ * kStageChunk + filled_, kStageChunk - filled_};
}

void Landing::arrived(void* to, uint64_t n) {
  if (filled_ == 0) to_ = static_cast<uint8_t*>(to);
  filled_ += n;
  if (filled_ == kStageChunk) flush();
}

void Landing::flush() {
  if (filled_ == 0) return;
  accelerator_->copy(stream_, to_, buffer_.for_device(buffer_.host() + now_ * kStageChunk), filled_,
                     CopyPath::Any);
  free_at_[now_] = copied_.enqueue(stream_);
  now_ = (now_ + 1) % kWindow;
  filled_ = 0;
}

void Landing::finish() { copied_.wait(copied_.enqueued()); }

}  // namespace afd_comm
