#include "afd_comm/region.h"

#include <unistd.h>

#include <algorithm>

#include "backends.h"
#include "packed_times.h"
#include "poller.h"

namespace afd_comm {
namespace {

constexpr std::size_t kOps = 64;  // of one call to the driver

}  // namespace

Region::Region(uint64_t slots, uint64_t slot_bytes, const RegionOptions& options)
    : name_(options.name),
      token_(random_token()),
      memory_(Memory::create(
          Geometry::of(slots, slot_bytes, options.payloads, !options.device.is_cpu()), token_,
          options.name)),
      device_(options.device),
      slot_traces_(new SlotTrace[geometry().slots]),
      creator_(getpid()),
      spin_ns_(static_cast<int64_t>(default_spin_ns())) {
  ShmAddress shm;
  shm.machine = machine_identity();
  shm.pid = creator_;
  shm.fd = memory_.fd().get();
  shm.bytes = geometry().total;
  shm.token = token_;
  if (!device_.is_cpu()) {
    addresses_.push_back(format(place_on_device(shm)));
  } else {
    addresses_.push_back(format(shm));
  }
  receivers_ = open_receivers(memory_, token_, options);
  for (const auto& receiver : receivers_) addresses_.push_back(receiver->address());
}

Region::~Region() {
  // A forked child holds a copy of this object but none of its threads, and must not end the
  // parent's region.
  if (getpid() == creator_) {
    close();
  } else {
    for (auto& receiver : receivers_) static_cast<void>(receiver.release());
    // The driver's state is not valid after a fork either.
    static_cast<void>(device_payload_.release());
    static_cast<void>(pinned_.release());
  }
}

IpcAddress Region::place_on_device(const ShmAddress& shm) {
  std::shared_ptr<Accelerator> accelerator = open_accelerator(device_);
  pinned_ = std::make_unique<Pinned>(accelerator, memory_.base(), geometry().total);
  device_payload_ = std::make_unique<DeviceMemory>(accelerator, geometry().payload_bytes());
  memory_.place_payload(device_payload_->get());
  IpcAddress address;
  address.memory = shm;
  address.device = device_;
  address.pointer = reinterpret_cast<uint64_t>(device_payload_->get());
  address.handle = accelerator->share(device_payload_->get());
  return address;
}

void Region::pin(Device device) {
  if (pinned_ != nullptr)
    throw CommError("region '" + name_ + "' already belongs to " +
                    device_text(pinned_->accelerator().device()));
  pinned_ = std::make_unique<Pinned>(open_accelerator(device), memory_.base(), geometry().total);
}

Accelerator& Region::accelerator() const {
  if (pinned_ == nullptr)
    throw CommError("no stream can wait for region '" + name_ +
                    "', which is in plain host memory; make it with device=, or call pin()");
  return pinned_->accelerator();
}

void Region::enqueue_wait(Stream stream, const Awaited* awaited, std::size_t count, bool reset) {
  Accelerator& device = accelerator();
  StreamOp ops[kOps];
  std::size_t filled = 0;
  const auto add = [&](StreamOp::Kind kind, uint32_t slot, uint64_t value) {
    if (filled == kOps) {
      device.run(stream, ops, filled);
      filled = 0;
    }
    ops[filled++] = {kind, pinned_->at(&memory_.control(slot).doorbell), value};
  };
  for (std::size_t i = 0; i < count; ++i)
    add(StreamOp::Kind::WaitEqual, awaited[i].slot, awaited[i].flag);
  for (std::size_t i = 0; reset && i < count; ++i) add(StreamOp::Kind::Write, awaited[i].slot, 0);
  if (filled != 0) device.run(stream, ops, filled);
}

void Region::close() {
  if (getpid() != creator_ || closed_.exchange(true, std::memory_order_acq_rel)) return;
  for (auto& receiver : receivers_) receiver->stop();
  memory_.head().closed.store(1, std::memory_order_release);
  memory_.nudge();
  for (auto& receiver : receivers_) receiver->kick();
  memory_.close_fd();
}

void Region::trace(SlotRange range, std::shared_ptr<PeerTrace> trace) {
  if (uint64_t{range.first} + range.count > slots())
    throw CommError("slots " + std::to_string(range.first) + " to " +
                    std::to_string(uint64_t{range.first} + range.count) +
                    " cannot be traced: region '" + name_ + "' has " + std::to_string(slots()));
  const std::lock_guard<std::mutex> lock(trace_mutex_);
  for (uint32_t i = 0; i < range.count; ++i)
    slot_traces_[range.first + i].trace.store(trace.get(), std::memory_order_release);
  if (trace != nullptr) traced_.store(true, std::memory_order_relaxed);
  // A wait may still use the replaced pointer, so keep all traces alive.
  if (trace != nullptr && std::find(traces_.begin(), traces_.end(), trace) == traces_.end())
    traces_.push_back(std::move(trace));
}

Times Region::times(uint32_t slot) const {
  const SlotControl& control = memory_.control(slot);
  Times times = read_times(control, clock_identity());
  if (control.header.traced == kNotTraced) return times;
  const SlotTrace& noted = slot_traces_[slot];
  const bool seen = noted.seen.load(std::memory_order_relaxed) ==
                    control.doorbell.load(std::memory_order_relaxed);
  times.consumed = seen ? noted.consumed.load(std::memory_order_relaxed) : 0;
  return times;
}

void Region::wake() {
  wakes_.fetch_add(1, std::memory_order_release);
  memory_.nudge();
  for (auto& receiver : receivers_) receiver->kick();
}

}  // namespace afd_comm
