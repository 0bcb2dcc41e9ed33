// Backend ipc: between processes of one host, for a sender on a GPU.
//
// The sender's copy engine copies the payload into the receiver's device memory (mapped through a
// CUDA or HIP IPC handle) or into its page-locked host memory. Then a stream write on the same
// stream rings the doorbell, which is always in host memory. On CUDA no kernel runs.
#include <sched.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "mapped_link.h"
#include "trace_clock.h"

namespace afd_comm {
namespace {

constexpr uint64_t kPollNs = 5000;
// The copy of a message between GPUs takes 10 to 100 us. The kernel adds up to 50 us to a nap, so
// for this long a post only yields its core between two looks.
constexpr uint64_t kPostYieldNs = 200000;

// The receiver's slots, as addressed by this process's device.
class Slots {
 public:
  // In the receiver's host memory.
  Slots() = default;
  // In its device memory.
  Slots(Accelerator& accelerator, const IpcAddress& address) : accelerator_(&accelerator) {
    if (address.memory.pid == getpid()) {
      // A process cannot import its own memory, and does not need to.
      accelerator.reach(address.device.index);
      memory_ = reinterpret_cast<void*>(address.pointer);
      return;
    }
    memory_ = accelerator.import(address.handle);
    imported_ = true;
  }
  Slots(Slots&& other) noexcept
      : accelerator_(other.accelerator_),
        memory_(other.memory_),
        imported_(std::exchange(other.imported_, false)) {}
  ~Slots() {
    if (imported_) accelerator_->drop(memory_);
  }
  void* get() const { return memory_; }

 private:
  Accelerator* accelerator_ = nullptr;
  void* memory_ = nullptr;
  bool imported_ = false;
};

class IpcLink final : public MappedLink {
 public:
  IpcLink(Memory memory, Slots slots, std::shared_ptr<Accelerator> accelerator,
          const LinkOptions& options)
      : MappedLink(std::move(memory), options),
        accelerator_(std::move(accelerator)),
        slots_(std::move(slots)),
        pinned_(accelerator_, memory_.base(), memory_.geometry().total),
        stream_(accelerator_->make_stream()),
        posted_(accelerator_->make_event(false)),
        kept_(accelerator_->make_event(false)),
        timeout_us_(options.timeout_us) {
    if (on_host()) memory_.head().silent.store(1, std::memory_order_relaxed);
  }

  ~IpcLink() override {
    accelerator_->destroy_event(posted_);
    accelerator_->destroy_event(kept_);
    accelerator_->destroy_stream(stream_);
  }

  const char* backend() const override { return "ipc"; }
  bool may_block() const override { return true; }

  Status enqueue(Stream stream, const Message& m, const uint32_t*) override {
    const Status checked = check(m);
    if (checked != Status::Ok) return checked;
    copy_parts(stream, m, on_host() ? CopyPath::Any : CopyPath::Devices);
    const SlotControl& control = memory_.control(m.slot);
    StreamOp ops[kHeaderWords + 1];
    std::size_t count = 0;
    if (on_host()) {
      // Only a consumer on the CPU can read the header, and writing each word costs 1.5 us.
      uint64_t words[kHeaderWords];
      std::memcpy(words, &m.header, sizeof words);
      const auto* header = reinterpret_cast<const uint64_t*>(&control.header);
      for (std::size_t i = 0; i < kHeaderWords; ++i)
        ops[count++] = {StreamOp::Kind::Write, pinned_.at(header + i), words[i]};
    }
    ops[count++] = {StreamOp::Kind::Write, pinned_.at(&control.doorbell), m.flag};
    accelerator_->run(stream, ops, count);
    return Status::Ok;
  }

  // The CPU rings once the copies are done. A stream write would do so earlier, but while streams
  // wait for a gate it could queue up behind such a wait, which this answer would end.
  std::optional<Status> begin_kept(const Message& m) override {
    const Status checked = check(m);
    if (checked != Status::Ok) return checked;
    try {
      copy_parts(stream_, m, on_host() ? CopyPath::Any : CopyPath::Devices);
      accelerator_->record(kept_, stream_);
    } catch (const CommError&) {
      return Status::Closed;  // the driver refuses; the caller's next call of it says why
    }
    sent_ = m;
    return advance();
  }

  std::optional<Status> advance() override {
    try {
      if (!accelerator_->done(kept_)) return std::nullopt;
    } catch (const CommError&) {
      return Status::Closed;
    }
    if (!owns(sent_.slot)) return Status::Closed;
    describe(memory_.control(sent_.slot), sent_, false, 0, 0);
    memory_.ring(sent_.slot, sent_.flag);
    return Status::Ok;
  }

  // Like enqueue() on the link's own stream, but the CPU writes header and doorbell.
  Status post(const Message& m) override {
    const bool trace = traced();
    const uint64_t posted = trace ? trace_now_ns() : 0;
    const Status checked = check(m);
    if (checked != Status::Ok) return checked;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      copy_parts(stream_, m, CopyPath::Any);
      accelerator_->record(posted_, stream_);
      const uint64_t deadline = deadline_after_us(timeout_us_), yield_end = now_ns() + kPostYieldNs;
      while (!accelerator_->done(posted_)) {
        const uint64_t now = now_ns();
        if (now >= deadline) return Status::Deadline;
        if (now < yield_end)
          sched_yield();
        else
          nap(kPollNs);
      }
    }
    if (!owns(m.slot)) return Status::Closed;
    describe(memory_.control(m.slot), m, trace, posted, trace ? trace_now_ns() : 0);
    memory_.ring(m.slot, m.flag);
    return Status::Ok;
  }

 private:
  // All words but the last, which holds packed times only.
  static constexpr std::size_t kHeaderWords = sizeof(Header) / sizeof(uint64_t) - 1;

  bool on_host() const { return !memory_.geometry().on_device; }

  void copy_parts(Stream stream, const Message& m, CopyPath path) const {
    uint8_t* const slot =
        on_host() ? static_cast<uint8_t*>(pinned_.at(memory_.payload(m.slot)))
                  : static_cast<uint8_t*>(slots_.get()) + memory_.geometry().payload_offset(m.slot);
    for (std::size_t i = 0; i < m.part_count; ++i) {
      const Part& part = m.parts[i];
      if (part.nbytes != 0)
        accelerator_->copy(stream, slot + part.offset, part.data, part.nbytes, path);
    }
  }

  std::shared_ptr<Accelerator> accelerator_;
  Slots slots_;
  Pinned pinned_;
  Stream stream_;
  Event posted_;
  Event kept_;    // behind the copies of sent_
  Message sent_;  // by begin_kept()
  int64_t timeout_us_;
  std::mutex mutex_;  // stream_ and posted_ serve one post at a time
};

std::unique_ptr<Link> open_link_ipc(const std::string& address, const LinkOptions& options) {
  std::shared_ptr<Accelerator> accelerator = open_accelerator(options.device);
  if (scheme_of(address) == "shm")
    return std::make_unique<IpcLink>(Memory::open(parse_shm(address)), Slots(), accelerator,
                                     options);
  const IpcAddress to = parse_ipc(address);
  if (to.device.kind != options.device.kind)
    throw CommError("the region's slots are on " + device_text(to.device) +
                    " and cannot be written from " + device_text(options.device) +
                    "; open the link with the device its caller runs on, of the same kind, or make "
                    "the region with device='cpu' and pin it");
  return std::make_unique<IpcLink>(Memory::open(to.memory), Slots(*accelerator, to), accelerator,
                                   options);
}

// Also writes into the host memory that shm addresses name. A caller on the host uses shm for that,
// unless it asks for ipc.
bool accepts(const std::string& scheme, const LinkOptions& options) {
  return scheme == "shm" && (options.backend == "ipc" || !options.device.is_cpu());
}

}  // namespace

const Backend ipc_backend{"ipc", true, open_link_ipc, nullptr, accepts};

}  // namespace afd_comm
