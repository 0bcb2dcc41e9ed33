#include "device_counter.h"

#include <utility>

#include "afd_comm/process.h"
#include "afd_comm/types.h"

namespace afd_comm {
namespace {

constexpr int64_t kStuckUs = 10000000;

}  // namespace

DeviceCounter::DeviceCounter(std::shared_ptr<Accelerator> accelerator)
    : accelerator_(std::move(accelerator)), buffer_(accelerator_, sizeof(uint64_t)) {}

uint64_t DeviceCounter::enqueue(Stream stream) {
  const StreamOp op{StreamOp::Kind::Write, buffer_.for_device(buffer_.host()), enqueued_ + 1,
                    false};
  accelerator_->run(stream, &op, 1);
  return ++enqueued_;
}

void DeviceCounter::wait(uint64_t count) const {
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
