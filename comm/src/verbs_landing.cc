#include "verbs_landing.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace afd_comm {

VerbsLanding::VerbsLanding(std::shared_ptr<Accelerator> accelerator, const Memory& memory,
                           const StageBuffer& staged, SlotRange slots)
    : accelerator_(std::move(accelerator)),
      memory_(memory),
      staged_(staged),
      first_slot_(slots.first),
      stream_(accelerator_->make_copy_stream()),
      copied_(accelerator_, kWindow),
      started_(slots.count),
      window_(kWindow) {}

VerbsLanding::~VerbsLanding() {
  try {
    // Also copies of messages that never became complete.
    copied_.wait(copied_.enqueue(stream_));
  } catch (const CommError&) {
  }
  accelerator_->destroy_stream(stream_);
}

bool VerbsLanding::start(const Record& record, uint32_t arrived) {
  Started& slot = started_[record.slot - first_slot_];
  const auto ahead = static_cast<int32_t>(record.head - slot.number);
  if (ahead < 0) return true;  // the next message has begun
  if (ahead > 0) slot = {record.head, 0};
  const uint32_t fresh = arrived & ~slot.stripes;
  slot.stripes |= arrived;
  const Geometry& g = memory_.geometry();
  Part parts[kMaxParts];
  uint64_t total = 0;
  for (std::size_t i = 0; i < kMaxParts; ++i) {
    const Extent& extent = record.extents[i];
    if (extent.offset > g.slot_bytes || extent.nbytes > g.slot_bytes - extent.offset) return false;
    parts[i] = {extent.offset, nullptr, extent.nbytes};
    total += extent.nbytes;
  }
  const uint64_t length = stripe_length(total, record.stripes, kStageChunk);
  uint8_t* const payload = memory_.payload(record.slot);
  const uint64_t base = g.payload_offset(record.slot);
  Piece pieces[kMaxPieces];
  for (uint32_t i = 0; i < record.stripes; ++i) {
    if (!(fresh >> i & 1)) continue;
    const Stripe stripe{0, std::min(i * length, total), std::min((i + 1) * length, total)};
    const std::size_t count =
        cut_stripe(parts, kMaxParts, stripe, std::numeric_limits<uint64_t>::max(), pieces);
    for (std::size_t n = 0; n < count; ++n)
      accelerator_->copy(stream_, payload + pieces[n].offset,
                         staged_.for_device(staged_.host() + base + pieces[n].offset),
                         pieces[n].nbytes, CopyPath::Any);
  }
  return true;
}

void VerbsLanding::expect(const Record& record) {
  const std::size_t count = count_.load(std::memory_order_relaxed);
  window_[(first_ + count) % kWindow] = {record, copied_.enqueue(stream_)};
  count_.store(count + 1, std::memory_order_release);
}

const Record* VerbsLanding::landed() {
  if (!any() || !copied_.reached(window_[first_].count)) return nullptr;
  return &window_[first_].record;
}

void VerbsLanding::pop() {
  first_ = (first_ + 1) % kWindow;
  count_.fetch_sub(1, std::memory_order_release);
}

void VerbsLanding::finish() { copied_.wait(copied_.enqueued()); }

}  // namespace afd_comm
