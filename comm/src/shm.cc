// Backend shm: the sender maps the receiver's region and writes into it by itself.
#include <unistd.h>

#include <atomic>

#include "afd_comm/claims.h"
#include "backends.h"
#include "copy.h"

namespace afd_comm {
namespace {

// How often post() asks the kernel whether the receiver lives: rare enough to cost nothing.
constexpr uint64_t kLookNs = 1000000;

class ShmLink final : public Link {
 public:
  ShmLink(Memory memory, const LinkOptions& options)
      : Link(options.trace),
        memory_(std::move(memory)),
        slots_(options.slots),
        creator_(getpid()),
        receiver_(memory_.head().owner) {
    if (!receiver_.alive() || memory_.head().closed.load(std::memory_order_acquire) != 0)
      throw CommError(
          "the region's process has ended or closed it; restart it and connect to its new address");
    const uint64_t deadline = deadline_after_us(options.timeout_us);
    ticket_ = take_claim(memory_, slots_, identify_process(creator_), memory_.fd().get(), deadline);
    memory_.close_fd();
  }

  ~ShmLink() override { close(); }

  const char* backend() const override { return "shm"; }
  bool may_block() const override { return false; }

  Status post(const Message& m) override {
    if (closed_.load(std::memory_order_acquire)) return Status::Closed;
    const Geometry& g = memory_.geometry();
    const Status checked = check_message(m, g.slots, g.slot_bytes, slots_);
    if (checked != Status::Ok) return checked;
    const bool trace = traced();
    const uint64_t posted = trace ? now_ns() : 0;
    if (!receiver_alive()) return Status::PeerGone;
    if (!owns(m.slot)) return Status::Closed;
    uint8_t* payload = memory_.payload(m.slot);
    for (std::size_t i = 0; i < m.part_count; ++i)
      if (m.parts[i].nbytes != 0)
        copy(payload + m.parts[i].offset, m.parts[i].data, m.parts[i].nbytes);
    // A newer writer may have come while this one copied; its doorbell must not be overwritten.
    if (!owns(m.slot)) return Status::Closed;
    SlotControl& control = memory_.control(m.slot);
    if (trace) {
      control.times = times_of(m, posted);
      control.times.sent = control.times.arrived = static_cast<int64_t>(now_ns());
    }
    control.header = m.header;
    control.header.traced = trace;
    memory_.ring(m.slot, m.flag);
    return Status::Ok;
  }

  void close() override {
    if (closed_.exchange(true, std::memory_order_acq_rel)) return;
    // A forked child's copy of this object must not end its parent's claim.
    if (getpid() == creator_ && slots_.count != 0) end_claim(memory_, slots_, ticket_);
  }

 private:
  bool owns(uint32_t slot) const {
    return slots_.count == 0 || holds_claim(memory_, slot, ticket_);
  }

  bool receiver_alive() {
    if (memory_.head().closed.load(std::memory_order_acquire) != 0) return false;
    if (receiver_ended_.load(std::memory_order_relaxed)) return false;
    const uint64_t now = coarse_now_ns();
    if (now - last_look_.load(std::memory_order_relaxed) < kLookNs) return true;
    last_look_.store(now, std::memory_order_relaxed);
    if (receiver_.alive()) return true;
    receiver_ended_.store(true, std::memory_order_relaxed);
    return false;
  }

  Memory memory_;
  SlotRange slots_;
  uint64_t ticket_ = 0;
  pid_t creator_;
  ProcessWatch receiver_;
  std::atomic<bool> closed_{false};
  std::atomic<bool> receiver_ended_{false};
  std::atomic<uint64_t> last_look_{0};
};

}  // namespace

std::unique_ptr<Link> open_shm_link(const std::string& address, const LinkOptions& options) {
  return std::make_unique<ShmLink>(Memory::open(parse_shm(address)), options);
}

}  // namespace afd_comm
