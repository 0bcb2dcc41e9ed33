// Backend verbs, receiver: the way of messages from the host memory that NICs wrote into a device,
// stripe by stripe, while later stripes are still on the wire.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include "afd_comm/memory.h"
#include "copy_counter.h"
#include "stage_buffer.h"
#include "verbs_plan.h"
#include "verbs_wire.h"

namespace afd_comm {

// For one thread at a time. After construction nothing allocates. The calls throw CommError if the
// device fails.
class VerbsLanding {
 public:
  // `staged`: what the NICs write in place of the slots' payloads. Throws CommError.
  VerbsLanding(std::shared_ptr<Accelerator> accelerator, const Memory& memory,
               const StageBuffer& staged, SlotRange slots);
  ~VerbsLanding();
  VerbsLanding(const VerbsLanding&) = delete;

  // Starts to copy the stripes in the bit set `arrived`, except those that it has started before.
  // `record`: of a message to one of the slots. Returns false if the parts do not fit into the
  // slot.
  bool start(const Record& record, uint32_t arrived);
  // All stripes of this message have been started: it lands when its bytes are on the device. Not
  // while full().
  void expect(const Record& record);
  // The oldest expected message, if it has landed, else null.
  const Record* landed();
  void pop();
  // Whether messages are expected. Any thread.
  bool any() const { return count_.load(std::memory_order_acquire) != 0; }
  bool full() const { return count_.load(std::memory_order_relaxed) == kWindow; }
  // Waits until all expected messages have landed.
  void finish();

 private:
  static constexpr std::size_t kWindow = 64;
  // Of a slot's newest message.
  struct Started {
    uint32_t number = 0;
    uint32_t stripes = 0;
  };
  struct Expected {
    Record record;
    uint64_t count = 0;  // of copied_ when its bytes are on the device
  };

  std::shared_ptr<Accelerator> accelerator_;
  const Memory& memory_;
  const StageBuffer& staged_;
  uint32_t first_slot_;
  Stream stream_;
  CopyCounter copied_;
  std::vector<Started> started_;
  std::vector<Expected> window_;
  std::size_t first_ = 0;  // the oldest of window_
  std::atomic<std::size_t> count_{0};
};

}  // namespace afd_comm
