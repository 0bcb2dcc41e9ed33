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

constexpr int64_t kClaimLockUs = 100000;
// A queue pair in the error state returns its receives at once; a device that does not is lost.
constexpr int64_t kDrainUs = 500000;
constexpr uint32_t kFewReceives = 64;
// wr_id of the last receive that is posted to a queue pair before it is closed.
constexpr uint64_t kMarker = uint64_t{1} << 32;

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
}

void VerbsConnection::say_farewell(Status reason) const {
  const VerbsReply reply{kVerbsFarewellMagic, 0, static_cast<int32_t>(reason), 0};
  static_cast<void>(send(fd_.get(), &reply, sizeof reply, MSG_NOSIGNAL | MSG_DONTWAIT));
}

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
  const uint32_t depth = std::clamp(2 * slots, kFewReceives, kOrderWindow / 2 / connect_.count);
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
  if (staged != nullptr) landing_ = std::make_unique<Landing>(host_.accelerator);
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

void VerbsConnection::complain() {
  broken_.store(true, std::memory_order_release);
  const uint64_t one = 1;
  static_cast<void>(!write(host_.wake_fd, &one, sizeof one));
}

// One flush covers all messages that were polled together: their bytes came before them.
void VerbsConnection::before(const ib::Wc* completions, int count) {
  if (!host_.flush) return;
  const bool any = std::any_of(completions, completions + count, [](const ib::Wc& wc) {
    return wc.status == ib::kWcSuccess && wc.opcode == ib::kWcRecvWithImm;
  });
  if (any) try {
      host_.accelerator->flush_remote_writes();
    } catch (const CommError&) {
      complain();
    }
}

// Copies a message from the host memory that the NIC wrote to the device.
bool VerbsConnection::land(const Record& record) {
  const Geometry& g = host_.memory.geometry();
  const uint64_t at = g.payload_offset(record.slot);
  try {
    for (const Extent& extent : record.extents) {
      if (extent.offset > g.slot_bytes || extent.nbytes > g.slot_bytes - extent.offset)
        return false;
      landing_->copy(host_.memory.payload(record.slot) + extent.offset, *host_.staged,
                     at + extent.offset, extent.nbytes);
    }
    landing_->finish();
  } catch (const CommError&) {
    return false;
  }
  return true;
}

// On a progress thread.
void VerbsConnection::on_completion(const ib::Wc& wc) {
  const auto index = static_cast<std::size_t>(static_cast<uint32_t>(wc.wr_id));
  Half& half = *halves_[index];
  // Flushed receives of a closed half. If a half failed by itself, the sender reports it.
  if (wc.status != ib::kWcSuccess || wc.opcode != ib::kWcRecvWithImm) {
    if (wc.wr_id & kMarker) half.drained.store(true, std::memory_order_release);
    return;
  }
  half.qp->post_recv(wc.wr_id);
  const Immediate immediate = decode(ntohl(wc.imm_data));
  if (immediate.stripe == kProbeStripe) return;
  if (immediate.slot >= incoming_.size() || immediate.stripe >= kMaxStripes) return complain();
  arrived(immediate);
}

void VerbsConnection::arrived(Immediate immediate) {
  std::atomic<uint64_t>& state = incoming_[immediate.slot].arrivals;
  uint64_t before = state.load(std::memory_order_acquire);
  uint64_t after = 0;
  do {
    after = with_arrival(before, immediate.tag, immediate.stripe);
    if (after == before) return;
  } while (!state.compare_exchange_weak(before, after, std::memory_order_acq_rel));
  // Without the leading stripe the record is not there yet.
  if (stripes_of(after) & 1) complete(immediate, stripes_of(after));
}

void VerbsConnection::complete(Immediate immediate, uint32_t stripes) {
  Record record;
  const uint8_t* source = records_ + immediate.slot * kRecordStride;
  std::memcpy(&record, source, sizeof record);
  // The record was overwritten: the sender gave this message up, and the next message's immediates
  // follow.
  if (record.head != record.tail || static_cast<uint8_t>(record.head) != immediate.tag) return;
  if (record.stripes == 0 || record.stripes > kMaxStripes) return complain();
  // Exactly one stripe completes the set, so exactly one progress thread gets past here.
  if (stripes != all_stripes(record.stripes)) return;
  const Geometry& g = host_.memory.geometry();
  Message message;
  message.slot = slots_.first + immediate.slot;
  message.flag = record.flag;
  if (record.slot != message.slot ||
      check_message(message, g.slots, g.slot_bytes, slots_) != Status::Ok ||
      record.header.nbytes < 0 || static_cast<uint64_t>(record.header.nbytes) > g.slot_bytes)
    return complain();
  deliver_in_turn(record);
}

void VerbsConnection::deliver_in_turn(const Record& record) {
  while (turning_.test_and_set(std::memory_order_acquire)) relax();
  const auto inside = [this](uint32_t order) { return order - next_ < kOrderWindow; };
  uint32_t& newest = incoming_[record.slot - slots_.first].newest;
  const auto ahead = static_cast<int32_t>(record.head - newest);
  // A record names the turn of the slot's previous message. If that message was overwritten before
  // this process saw it (because the process was stopped), the turn before it is unknown, and all
  // later messages would wait for it forever. If it is not ahead, another NIC's thread has already
  // handled it.
  if (ahead <= 0 || ahead > 2 || !inside(record.order)) {
    turning_.clear(std::memory_order_release);
    return ahead > 0 ? complain() : void();
  }
  newest = record.head;
  // If the turn of the slot's previous message has not come yet, that message is lost.
  if (record.before != 0 && inside(record.before))
    window_[record.before % kOrderWindow].state = Arrived::State::Overwritten;
  window_[record.order % kOrderWindow] = {Arrived::State::Complete, record};
  while (true) {
    Arrived& due = window_[next_ % kOrderWindow];
    if (due.state == Arrived::State::Unknown) break;
    if (due.state == Arrived::State::Complete) deliver(due.record);
    due.state = Arrived::State::Unknown;
    ++next_;
  }
  turning_.clear(std::memory_order_release);
}

void VerbsConnection::deliver(const Record& record) {
  // A newer writer may have claimed the slot.
  if (serial_ != 0 && !holds_claim(host_.memory, record.slot, serial_)) return complain();
  // Bytes that could not be flushed must not be announced.
  if (broken_.load(std::memory_order_relaxed)) return;
  if (landing_ != nullptr && !land(record)) return complain();
  SlotControl& control = host_.memory.control(record.slot);
  control.header = record.header;
  control.header.traced = record.header.traced != kNotTraced ? kTimesInLine : kNotTraced;
  if (record.header.traced != kNotTraced) {
    control.times = record.times;
    control.times.arrived = static_cast<int64_t>(trace_now_ns());
  }
  host_.memory.ring(record.slot, record.flag);
}

}  // namespace afd_comm
