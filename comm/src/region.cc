#include "afd_comm/region.h"

#include <unistd.h>

#include <algorithm>

#include "backends.h"

namespace afd_comm {
namespace {

// With a core to spare spinning is free; on two cores it takes the peer's time. Measured, see
// README.
constexpr int kFewCpus = 2;
constexpr int64_t kSpinNs = 50000;
constexpr int64_t kSpinNsFewCpus = 5000;

}  // namespace

Region::Region(uint64_t slots, uint64_t slot_bytes, const RegionOptions& options)
    : name_(options.name),
      token_(random_token()),
      memory_(Memory::create(Geometry::of(slots, slot_bytes), token_, options.name)),
      slot_traces_(new SlotTrace[geometry().slots]),
      creator_(getpid()),
      spin_ns_(usable_cpus() > kFewCpus ? kSpinNs : kSpinNsFewCpus) {
  ShmAddress shm;
  shm.machine = machine_identity();
  shm.pid = creator_;
  shm.fd = memory_.fd().get();
  shm.bytes = geometry().total;
  shm.token = token_;
  addresses_.push_back(format(shm));
  if (!options.tcp_host.empty())
    receivers_.push_back(open_tcp_receiver(memory_, token_, options.tcp_host, options.tcp_port));
  if (options.verbs) receivers_.push_back(open_verbs_receiver(memory_, token_, *options.verbs));
  for (const auto& receiver : receivers_) addresses_.push_back(receiver->address());
}

Region::~Region() {
  // A forked child holds a copy of this object but none of its threads, and must not end the
  // parent's region.
  if (getpid() == creator_) {
    close();
  } else {
    for (auto& receiver : receivers_) static_cast<void>(receiver.release());
  }
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
  // A wait may still hold the pointer it replaced, so all of them stay.
  if (trace != nullptr && std::find(traces_.begin(), traces_.end(), trace) == traces_.end())
    traces_.push_back(std::move(trace));
}

void Region::wake() {
  wakes_.fetch_add(1, std::memory_order_release);
  memory_.nudge();
  for (auto& receiver : receivers_) receiver->kick();
}

}  // namespace afd_comm
