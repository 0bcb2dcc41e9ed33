#include "afd_comm/memory.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <new>
#include <utility>

#include "headroom.h"

namespace afd_comm {
namespace {

constexpr uint64_t kMaxBytes = uint64_t{1} << 46;

uint8_t* map(int fd, uint64_t bytes, const std::string& what) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED)
    throw CommError("cannot map " + std::to_string(bytes) + " bytes of " + what + ": " +
                    errno_text(errno) + "; free memory or lower the number or size of slots");
#ifdef MADV_POPULATE_WRITE
  // Take the page faults during set-up, not on the hot path. Older kernels fault lazily.
  madvise(base, bytes, MADV_POPULATE_WRITE);
#endif
  return static_cast<uint8_t*>(base);
}

Fd new_memfd(const std::string& name) {
  const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
#ifdef MFD_NOEXEC_SEAL
  Fd fd(memfd_create(name.c_str(), flags | MFD_NOEXEC_SEAL));
  if (fd || errno != EINVAL) return fd;
#endif
  return Fd(memfd_create(name.c_str(), flags));
}

[[noreturn]] void cannot_open(const ShmAddress& a, int error) {
  const std::string who = "process " + std::to_string(a.pid);
  if (error == EACCES || error == EPERM)
    throw CommError(
        "cannot open the shared memory of " + who +
        ": permission denied; run both processes as the same user and in one PID namespace "
        "(docker: --pid=host or --pid=container:NAME), or set transport.backend: tcp");
  if (error == ENOENT || error == ESRCH)
    throw CommError(
        "cannot open the shared memory of " + who +
        ": the process has ended or closed its region; restart it and connect to its new address");
  throw CommError("cannot open the shared memory of " + who + ": " + errno_text(error) +
                  "; check /proc is mounted, or set transport.backend: tcp");
}

}  // namespace

Geometry Geometry::of(uint64_t slots, uint64_t slot_bytes, uint64_t payloads, bool on_device) {
  if (slots == 0 || slot_bytes == 0)
    throw CommError("a region needs at least one slot of at least one byte; got " +
                    std::to_string(slots) + " slots of " + std::to_string(slot_bytes) + " bytes");
  if (slots > (uint64_t{1} << 24) || slot_bytes > kMaxBytes ||
      slots * round_up(slot_bytes, kLine) / slots != round_up(slot_bytes, kLine) ||
      slots * round_up(slot_bytes, kLine) > kMaxBytes)
    throw CommError("a region of " + std::to_string(slots) + " slots of " +
                    std::to_string(slot_bytes) + " bytes is too large; lower the slot capacity");
  if (payloads == 0) payloads = slots;
  if (slots % payloads != 0)
    throw CommError("a region of " + std::to_string(slots) + " slots cannot share " +
                    std::to_string(payloads) +
                    " payloads; the number of payloads must divide the number of slots");
  Geometry g;
  g.slots = static_cast<uint32_t>(slots);
  g.payloads = static_cast<uint32_t>(payloads);
  g.on_device = on_device;
  g.slot_bytes = slot_bytes;
  g.claims = round_up(sizeof(RegionHead), kLine);
  g.controls = g.claims + slots * sizeof(Claim);
  g.payload = round_up(g.controls + slots * sizeof(SlotControl), kPage);
  g.stride = round_up(slot_bytes, kLine);
  g.total = round_up(g.payload + (on_device ? 0 : g.payload_bytes()), kPage);
  return g;
}

Memory::Memory(Fd fd, uint8_t* base, const Geometry& geometry)
    : fd_(std::move(fd)),
      base_(base),
      payload_(geometry.on_device ? nullptr : base + geometry.payload),
      geometry_(geometry) {}

Memory::Memory(Memory&& other) noexcept
    : fd_(std::move(other.fd_)),
      base_(std::exchange(other.base_, nullptr)),
      payload_(other.payload_),
      geometry_(other.geometry_) {}

Memory::~Memory() {
  if (base_ != nullptr) munmap(base_, geometry_.total);
}

Memory Memory::create(const Geometry& g, const Token& token, const std::string& name) {
  const std::string what = "region '" + name + "'";
  const Headroom headroom = memory_headroom();
  if (g.total > headroom.bytes)
    throw CommError(what + " needs " + std::to_string(g.total) + " bytes but only " +
                    std::to_string(headroom.bytes) + " are left of " + headroom.limit +
                    "; free memory, raise the limit, or lower the number or size of slots");
  Fd fd = new_memfd("afd:" + name.substr(0, 200));
  if (!fd)
    throw CommError("cannot create " + what + ": " + errno_text(errno) +
                    "; raise the open-files limit");
  if (ftruncate(fd.get(), static_cast<off_t>(g.total)) != 0)
    throw CommError("cannot size " + what + " to " + std::to_string(g.total) +
                    " bytes: " + errno_text(errno) + "; raise the file-size limit (ulimit -f)");
  // Reserve memory now: a shortage must be an error here, not a SIGBUS later.
  if (fallocate(fd.get(), 0, 0, static_cast<off_t>(g.total)) != 0 && errno != EOPNOTSUPP)
    throw CommError("cannot reserve " + std::to_string(g.total) + " bytes for " + what + ": " +
                    errno_text(errno) + "; free memory or lower the number or size of slots");
  // Sealed, so that no process, not even the owner, can shrink it while a peer uses it.
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    throw CommError("cannot seal " + what + ": " + errno_text(errno));
  uint8_t* base = map(fd.get(), g.total, what);
  Memory memory(std::move(fd), base, g);
  RegionHead* head = new (base) RegionHead{};
  head->magic = kRegionMagic;
  head->version = kRegionVersion;
  head->slots = g.slots;
  head->slot_bytes = g.slot_bytes;
  head->payloads = g.payloads;
  head->on_device = g.on_device;
  head->owner = identify_process(getpid());
  std::memcpy(head->token, token.data(), token.size());
  head->clock = clock_identity();
  for (uint32_t i = 0; i < g.slots; ++i) {
    new (&memory.claim(i)) Claim{};
    new (&memory.control(i)) SlotControl{};
  }
  return memory;
}

Memory Memory::open(const ShmAddress& a) {
  if (a.machine != machine_identity() || a.machine == "unknown")
    throw CommError("process " + std::to_string(a.pid) +
                    " runs on another machine or in another PID namespace; share the namespace "
                    "(docker: --pid=host or --pid=container:NAME), or set transport.backend: tcp");
  const std::string path = "/proc/" + std::to_string(a.pid) + "/fd/" + std::to_string(a.fd);
  // The descriptor may refer to something else by now, such as a pipe or a device. Check before
  // opening it.
  const std::string stranger = "process " + std::to_string(a.pid) +
                               " no longer owns that region (it closed it, or its pid was reused); "
                               "connect to the address its owner gives now";
  struct stat info{};
  if (stat(path.c_str(), &info) != 0) cannot_open(a, errno);
  if (!S_ISREG(info.st_mode)) throw CommError(stranger);
  Fd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK));
  if (!fd) cannot_open(a, errno);
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (fstat(fd.get(), &info) != 0 || seals < 0 || !(seals & F_SEAL_SHRINK) ||
      static_cast<uint64_t>(info.st_size) != a.bytes || a.bytes < kPage)
    throw CommError(stranger);
  RegionHead* head =
      static_cast<RegionHead*>(mmap(nullptr, kPage, PROT_READ, MAP_SHARED, fd.get(), 0));
  if (head == MAP_FAILED) cannot_open(a, errno);
  const bool ours = head->magic == kRegionMagic && same_token(head->token, a.token.data());
  const uint32_t version = head->version;
  const uint64_t slots = head->slots, slot_bytes = head->slot_bytes, payloads = head->payloads;
  const bool on_device = head->on_device != 0;
  munmap(head, kPage);
  if (!ours) throw CommError(stranger);
  if (version != kRegionVersion)
    throw CommError("the peer's region has layout version " + std::to_string(version) +
                    ", but this library uses " + std::to_string(kRegionVersion) +
                    "; install the same afd_comm on both sides");
  const Geometry g = Geometry::of(slots, slot_bytes, payloads, on_device);
  if (g.total != a.bytes) throw CommError(stranger);
  uint8_t* base = map(fd.get(), g.total, "the region of process " + std::to_string(a.pid));
  return Memory(std::move(fd), base, g);
}

void Memory::ring(uint32_t slot, uint64_t flag) const {
  control(slot).doorbell.store(flag, std::memory_order_release);
  nudge();
}

void Memory::nudge() const {
  // Sequentially consistent on both sides: either the waiter sees the new count, or we see the
  // sleeper.
  std::atomic<uint32_t>& arrivals = head().arrivals;
  arrivals.fetch_add(1, std::memory_order_seq_cst);
  if (head().sleepers.load(std::memory_order_seq_cst) != 0)
    syscall(SYS_futex, &arrivals, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool Memory::sleep(uint32_t seen, uint64_t timeout_ns) const {
  timespec timeout{static_cast<time_t>(timeout_ns / 1000000000u),
                   static_cast<long>(timeout_ns % 1000000000u)};
  return syscall(SYS_futex, &head().arrivals, FUTEX_WAIT, seen, &timeout, nullptr, 0) != 0 &&
         errno == EINTR;
}

}  // namespace afd_comm
