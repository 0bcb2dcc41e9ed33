#include "verbs_connection.h"

#include <arpa/inet.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "afd_comm/link.h"
#include "packed_times.h"
#include "trace_clock.h"

namespace afd_comm {
namespace {

// A queue pair in the error state returns its receives at once; a device that does not is lost.
constexpr int64_t kDrainUs = 500000;
constexpr uint32_t kFewReceives = 64;

}  // namespace

VerbsConnection::VerbsConnection(Fd fd, VerbsHost& host)
    : fd_(std::move(fd)), host_(host), accepted_ns_(now_ns()) {}

VerbsConnection::~VerbsConnection() {
  stop();
  if (serial_ != 0) end_claim(host_.memory, slots_, serial_);
  for (const auto& queue : queues_) queue->detach();
  halves_.clear();
  queues_.clear();
  record_keys_.clear();
  if (records_ != nullptr) munmap(records_, records_bytes_);
}

void VerbsConnection::stop() {
  if (stopped_) return;
  stopped_ = true;
  for (std::size_t i = 0; i < halves_.size(); ++i) close_half(i);
  if (landing_ == nullptr) return;
  first_poller().remove(*this);
  const Turn turn(turning_);
  try {
    landing_->finish();
    ring_landed();
  } catch (const CommError&) {
    broken_.store(true, std::memory_order_release);
  }
}

void VerbsConnection::say_farewell(Status reason) const {
  const VerbsReply reply{kVerbsFarewellMagic, 0, static_cast<int32_t>(reason), 0};
  static_cast<void>(send(fd_.get(), &reply, sizeof reply, MSG_NOSIGNAL | MSG_DONTWAIT));
}

Poller& VerbsConnection::first_poller() const { return host_.nics[0]->progress().poller(); }

uint32_t VerbsConnection::slot_count() const {
  return slots_.count != 0 ? slots_.count : host_.memory.geometry().slots;
}

int VerbsConnection::fill(void* target, std::size_t size) {
  const ssize_t n = recv(fd_.get(), static_cast<char*>(target) + have_, size - have_, MSG_DONTWAIT);
  if (n < 0) return errno == EAGAIN || errno == EINTR ? 0 : -1;
  if (n == 0) return -1;
  have_ += static_cast<std::size_t>(n);
  if (have_ < size) return 0;
  have_ = 0;
  return 1;
}

template <typename Frame>
bool VerbsConnection::answer(const Frame& frame) const {
  return send(fd_.get(), &frame, sizeof frame, MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(sizeof frame);
}

bool VerbsConnection::on_readable() {
  int filled = 0;
  switch (phase_) {
    case Phase::Hello:
      filled = fill(&hello_, sizeof hello_);
      return filled > 0 ? accept_hello() : filled == 0;
    case Phase::Connect:
      filled = fill(&connect_, sizeof connect_);
      return filled > 0 ? accept_connect() : filled == 0;
    case Phase::Ready:
      filled = fill(&fence_, sizeof fence_);
      return filled > 0 ? answer_fence() : filled == 0;
  }
  return false;
}

bool VerbsConnection::accept_hello() {
  // Send no reply to a peer without the token.
  if (hello_.magic != kVerbsHelloMagic || !same_token(hello_.token, host_.token.data()))
    return false;
  const Geometry& g = host_.memory.geometry();
  VerbsWelcome welcome{};
  welcome.magic = kVerbsWelcomeMagic;
  welcome.version = kVerbsVersion;
  welcome.slots = g.slots;
  welcome.slot_bytes = g.slot_bytes;
  welcome.stride = g.stride;
  welcome.payloads = g.payloads;
  bool accepted = hello_.version == kVerbsVersion;
  if (accepted) try {
      const SlotRange range{hello_.first, hello_.count};
      for (std::size_t i = 0; i < host_.ports.size(); ++i) {
        const PortFacts port =
            host_.nics[host_.port_nic[i]]->port(host_.ports[i].number, host_.options.gid_index);
        WirePort& wire = welcome.ports[welcome.port_count++];
        std::memcpy(wire.name, port.name.data(), std::min(port.name.size(), sizeof wire.name - 1));
        std::memcpy(wire.gid, port.gid, sizeof wire.gid);
        wire.lid = port.lid;
        wire.link_layer = port.link_layer;
        wire.mtu = port.mtu;
        wire.active = port.active;
      }
      // Claim in this process's name. Its progress thread rings, so a waiter must sleep on the
      // futex and must not serve another backend's connections.
      serial_ = take_claim(host_.memory, range, identify_process(getpid()), host_.claim_lock_fd,
                           deadline_after_us(kClaimLockUs));
      slots_ = range;
    } catch (const CommError& error) {
      welcome.status = static_cast<int32_t>(Status::Capacity);
      set_reason(welcome.reason, error.what());
      accepted = false;
    }
  phase_ = Phase::Connect;
  return answer(welcome) && accepted;
}

bool VerbsConnection::accept_connect() {
  if (connect_.magic != kVerbsConnectMagic || connect_.count == 0 || connect_.count > kMaxVerbsQps)
    return false;
  for (uint32_t i = 0; i < connect_.count; ++i)
    if (connect_.qps[i].port >= host_.ports.size()) return false;
  VerbsAccept accept{};
  accept.magic = kVerbsAcceptMagic;
  bool accepted = true;
  try {
    connect(accept);
  } catch (const CommError& error) {
    accept.status = static_cast<int32_t>(Status::Capacity);
    set_reason(accept.reason, error.what());
    accepted = false;
  }
  phase_ = Phase::Ready;
  return answer(accept) && accepted;
}

void VerbsConnection::connect(VerbsAccept& accept) {
  const uint32_t slots = slot_count();
  // All messages that arrived but were not processed fit into half of the order window.
  const uint32_t depth =
      std::clamp(kMaxStripes * slots, kFewReceives, kOrderWindow / 2 / connect_.count);
  records_bytes_ = round_up(slots * kRecordStride + kTestBytes, kPage);
  void* memory =
      mmap(nullptr, records_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    throw CommError("cannot allocate the records of a connection: " + errno_text(errno) +
                    "; free memory");
  records_ = static_cast<uint8_t*>(memory);
  incoming_ = std::vector<Incoming>(slots);
  window_.resize(kOrderWindow);
  std::vector<uint32_t> halves(host_.nics.size(), 0);
  for (uint32_t i = 0; i < connect_.count; ++i) ++halves[host_.port_nic[connect_.qps[i].port]];
  for (std::size_t i = 0; i < host_.nics.size(); ++i) {
    const unsigned access = ib::kLocalWrite | ib::kRemoteWrite;
    record_keys_.emplace_back(host_.nics[i], records_, records_bytes_, access);
    // One more per half for the marker of close_half().
    const auto entries = static_cast<int>(std::max(halves[i] * (depth + 1), 1u));
    queues_.push_back(std::make_unique<CompletionQueue>(host_.nics[i], entries,
                                                        static_cast<CompletionSink*>(this)));
  }
  for (uint32_t i = 0; i < connect_.count; ++i) {
    const WireQp& peer = connect_.qps[i];
    auto half = std::make_unique<Half>();
    half->nic = host_.port_nic[peer.port];
    const auto& nic = host_.nics[half->nic];
    const PortFacts port = nic->port(host_.ports[peer.port].number, host_.options.gid_index);
    half->qp = std::make_unique<QueuePair>(nic, port, *queues_[half->nic], QpDepth{1, depth + 1});
    halves_.push_back(std::move(half));
  }
  for (uint32_t i = 0; i < connect_.count; ++i) {
    Half& half = *halves_[i];
    for (uint32_t n = 0; n < depth; ++n) half.qp->post_recv(i);
    accept.qps[i] = half.qp->half();
    accept.qps[i].payload_rkey = host_.payload[half.nic].rkey();
    accept.qps[i].records_rkey = record_keys_[half.nic].rkey();
    try {
      half.qp->connect(connect_.qps[i], "port", host_.options);
    } catch (const CommError& error) {
      // The other paths may suffice; the sender decides.
      accept.qps[i].refused = 1;
      set_reason(accept.reason, error.what());
    }
  }
  const StageBuffer* const staged = host_.staged.get();
  if (staged != nullptr) {
    landing_ = std::make_unique<VerbsLanding>(host_.accelerator, host_.memory, *staged,
                                              SlotRange{slots_.first, slots});
    first_poller().add(*this);
  }
  accept.staged = staged != nullptr;
  accept.payload = reinterpret_cast<uintptr_t>(staged ? staged->host() : host_.memory.payload(0));
  accept.records = reinterpret_cast<uintptr_t>(records_);
}

// After this the peer's half writes nothing more, and every immediate it delivered has been
// processed. Returns false if the device does not confirm this in time.
bool VerbsConnection::close_half(std::size_t index) {
  Half& half = *halves_[index];
  if (half.closed) return true;
  half.closed = true;
  // Receives complete in order, so this one completes after all used ones. It is posted before the
  // close, because soft-RoCE ignores receives posted after the flush.
  if (!half.qp->post_recv(kMarker | index)) return false;
  half.qp->fail();
  const uint64_t deadline = deadline_after_us(kDrainUs);
  while (!half.drained.load(std::memory_order_acquire)) {
    if (now_ns() >= deadline) return false;
    nap(50000);
  }
  return true;
}

bool VerbsConnection::answer_fence() {
  if (fence_.magic != kVerbsFenceMagic || fence_.qp >= halves_.size()) return false;
  if (!close_half(fence_.qp)) return false;
  const VerbsReply reply{kVerbsFencedMagic, fence_.qp, 0, static_cast<uint32_t>(incoming_.size())};
  std::vector<uint8_t> bytes(sizeof reply + incoming_.size() * sizeof(uint64_t));
  std::memcpy(bytes.data(), &reply, sizeof reply);
  for (std::size_t i = 0; i < incoming_.size(); ++i) {
    const uint64_t arrivals = incoming_[i].arrivals.load(std::memory_order_acquire);
    std::memcpy(bytes.data() + sizeof reply + i * sizeof arrivals, &arrivals, sizeof arrivals);
  }
  // Half a megabyte at most, and rare. A peer that does not read it is not working anyway.
  return send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(bytes.size());
}

bool VerbsConnection::needs_drop() {
  const bool broken = broken_.load(std::memory_order_acquire);
  for (uint32_t slot = slots_.first; serial_ != 0 && slot - slots_.first < slots_.count; ++slot) {
    if (holds_claim(host_.memory, slot, serial_)) continue;
    say_farewell(Status::Closed);
    return true;
  }
  return broken;
}

}  // namespace afd_comm
