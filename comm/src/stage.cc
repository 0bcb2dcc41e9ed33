#include "stage.h"

#include <algorithm>
#include <utility>

namespace afd_comm {
Stage::Stage(std::shared_ptr<Accelerator> accelerator)
    : accelerator_(std::move(accelerator)),
      stream_(accelerator_->make_copy_stream()),
      copied_(accelerator_, kWindow) {}

Stage::~Stage() { accelerator_->destroy_stream(stream_); }

void Stage::begin(Message& message, const StageBuffer& buffer) {
  buffer_ = &buffer;
  part_count_ = message.part_count;
  part_ = 0;
  in_part_ = issued_ = total_ = 0;
  available_.store(0, std::memory_order_relaxed);
  first_ = flying_ = 0;
  for (std::size_t i = 0; i < part_count_; ++i) {
    parts_[i] = message.parts[i];
    message.parts[i].data = buffer.host() + total_;
    total_ += parts_[i].nbytes;
  }
  if (total_ != 0) issue();
}

void Stage::issue() {
  while (in_part_ == parts_[part_].nbytes) {
    ++part_;
    in_part_ = 0;
  }
  const uint64_t n = std::min(parts_[part_].nbytes - in_part_, kStageChunk);
  accelerator_->copy(stream_, buffer_->for_device(buffer_->host() + issued_),
                     static_cast<const uint8_t*>(parts_[part_].data) + in_part_, n, CopyPath::Any);
  in_part_ += n;
  issued_ += n;
  ring_[(first_ + flying_) % kWindow] = {copied_.enqueue(stream_), issued_};
  ++flying_;
}

void Stage::advance() {
  while (flying_ != 0 && copied_.reached(ring_[first_].count)) {
    available_.store(ring_[first_].end, std::memory_order_release);
    first_ = (first_ + 1) % kWindow;
    --flying_;
  }
  // One at a time: while the driver takes a chunk, the caller could send an earlier one.
  if (issued_ < total_ && flying_ < kWindow) issue();
}

}  // namespace afd_comm
