// The reference accelerator: its stream is the calling thread, and every operation is complete on
// return.

#include <atomic>
#include <cstring>
#include <new>

#include "accelerator.h"
#include "afd_comm/types.h"

namespace afd_comm {
namespace {

constexpr int kDlCpu = 1;
constexpr uint64_t kWaitNs = 10000000000;
constexpr std::size_t kAlign = 4096;

uint64_t load(const StreamOp& op) {
  if (op.narrow)
    return static_cast<const std::atomic<uint32_t>*>(op.address)->load(std::memory_order_acquire);
  return static_cast<const std::atomic<uint64_t>*>(op.address)->load(std::memory_order_acquire);
}

void store(const StreamOp& op) {
  if (op.narrow)
    static_cast<std::atomic<uint32_t>*>(op.address)
        ->store(static_cast<uint32_t>(op.value), std::memory_order_release);
  else
    static_cast<std::atomic<uint64_t>*>(op.address)->store(op.value, std::memory_order_release);
}

bool satisfied(const StreamOp& op) {
  const uint64_t difference = load(op) - op.value;
  if (op.kind == StreamOp::Kind::WaitEqual) return difference == 0;
  return op.narrow ? static_cast<int32_t>(difference) >= 0 : static_cast<int64_t>(difference) >= 0;
}

struct Moment {
  uint64_t ns = 0;
};

class Cpu final : public Accelerator {
 public:
  Device device() const override { return {}; }
  int dlpack_type() const override { return kDlCpu; }

  void* allocate(std::size_t bytes) override {
    void* const memory = ::operator new(bytes, std::align_val_t(kAlign));
    return std::memset(memory, 0, bytes);
  }
  void free(void* memory) noexcept override { ::operator delete(memory, std::align_val_t(kAlign)); }
  void* pin(void* host, std::size_t) override { return host; }
  void unpin(void*) noexcept override {}
  MemoryHandle share(void*) override { not_here(); }
  void* import(const MemoryHandle&) override { not_here(); }
  void drop(void*) noexcept override {}
  void reach(int) override {}
  DmaBuf dmabuf(void*, std::size_t) override { not_here(); }
  MemoryRange range_of(const void*) override { not_here(); }
  RemoteWrites remote_writes() override { return RemoteWrites::Ordered; }
  void flush_remote_writes() override {}

  Stream make_stream() override { return nullptr; }
  Stream make_copy_stream() override { return nullptr; }
  bool capturing(Stream) override { return false; }
  void destroy_stream(Stream) noexcept override {}
  void copy(Stream, void* to, const void* from, std::size_t bytes, CopyPath) override {
    std::memcpy(to, from, bytes);
  }
  void run(Stream, const StreamOp* ops, std::size_t count) override {
    for (std::size_t i = 0; i < count; ++i) {
      if (ops[i].kind == StreamOp::Kind::Write)
        store(ops[i]);
      else
        await(ops[i]);
    }
  }

  Event make_event(bool) override { return new Moment; }
  void destroy_event(Event event) noexcept override { delete static_cast<Moment*>(event); }
  void record(Event event, Stream) override { static_cast<Moment*>(event)->ns = now_ns(); }
  bool done(Event) override { return true; }
  float elapsed_ms(Event from, Event to) override {
    const uint64_t ns = static_cast<Moment*>(to)->ns - static_cast<Moment*>(from)->ns;
    return static_cast<float>(ns) / 1e6f;
  }

 private:
  [[noreturn]] static void not_here() {
    throw CommError("host memory is shared by the shm backend; use it for device cpu");
  }

  static void await(const StreamOp& op) {
    const uint64_t end = now_ns() + kWaitNs;
    while (!satisfied(op)) {
      if (now_ns() >= end)
        throw CommError(
            "a wait enqueued on the cpu got no message for 10 s; use wait_all, "
            "which has a deadline");
      nap(20000);
    }
  }
};

}  // namespace

std::shared_ptr<Accelerator> open_cpu() { return std::make_shared<Cpu>(); }

}  // namespace afd_comm
