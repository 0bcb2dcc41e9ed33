#include "verbs_link.h"

#include <arpa/inet.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "packed_times.h"
#include "trace_clock.h"

namespace afd_comm {
namespace {

// An acknowledgement usually takes a few microseconds; spin this long before sleeping.
constexpr int kSpins = 2000;
constexpr uint64_t kSleepSliceNs = 50000000;
// Threads that may be between wait_window() and their message's number.
constexpr uint32_t kMaxThreads = 64;
// How long close() waits for messages that are still on their way.
constexpr int64_t kLingerUs = 1000000;

// wr_id: which stripe of which message over which path.
struct RequestId {
  uint32_t index;
  uint8_t tag;
  uint8_t stripe;
  uint8_t path;
};
constexpr uint64_t encode_id(RequestId id) {
  return uint64_t{id.index} << 32 | uint64_t{id.tag} << 16 | uint64_t{id.stripe} << 8 | id.path;
}
constexpr RequestId decode_id(uint64_t bits) {
  return {static_cast<uint32_t>(bits >> 32), static_cast<uint8_t>(bits >> 16),
          static_cast<uint8_t>(bits >> 8), static_cast<uint8_t>(bits)};
}

}  // namespace

uint64_t verbs_test_id(uint32_t path) {
  return encode_id({0, 0, kProbeStripe, static_cast<uint8_t>(path)});
}

Status VerbsLink::check(const Message& m) const {
  if (closed_.load(std::memory_order_acquire)) return Status::Closed;
  return check_message(m, region_slots_, slot_bytes_, options_.slots);
}

Status VerbsLink::post(const Message& m) {
  const Status checked = check(m);
  if (checked != Status::Ok) return checked;
  const uint64_t posted = traced() ? trace_now_ns() : 0;
  const uint32_t index = m.slot - first_;
  Outgoing& out = out_[index];
  // A NIC may still read its bounce buffer and record.
  const uint64_t deadline = deadline_after_us(options_.timeout_us);
  Status ready = wait_acknowledged(out, deadline);
  if (ready == Status::Ok) ready = wait_window(deadline);
  if (ready == Status::Ok) ready = prepare(index, m, posted);
  if (ready != Status::Ok) return ready;
  send_stripes(index);
  return Status::Ok;
}

// The leading stripe has the record. It is posted last, so that it arrives when the others have,
// but to a staged receiver first: that copies each stripe as it comes.
void VerbsLink::send_stripes(uint32_t index) {
  const StripePlan& plan = out_[index].plan;
  for (uint32_t n = 0; n < plan.count; ++n) {
    const uint32_t i = remote_staged_ ? n : plan.count - 1 - n;
    send_stripe(index, i, plan.stripes[i].qp);
  }
}

// Gives the message its number in slot and link, its stripes and its record.
Status VerbsLink::prepare(uint32_t index, const Message& m, uint64_t posted) {
  Outgoing& out = out_[index];
  uint64_t total = 0;
  out.part_count = m.part_count;
  for (std::size_t i = 0; i < m.part_count; ++i) {
    out.parts[i] = m.parts[i];
    total += m.parts[i].nbytes;
    out.sources[i] = source_of(m.parts[i]);
    if (out.sources[i] != nullptr || m.parts[i].nbytes == 0) continue;
    // The CPU cannot copy device memory, so it must be registered.
    if (!options_.device.is_cpu()) return Status::BadHeader;
    uint8_t* copy = copy_at(index) + m.parts[i].offset;
    std::memcpy(copy, m.parts[i].data, m.parts[i].nbytes);
    out.parts[i].data = copy;
    out.sources[i] = sources_[0].get();
  }
  const uint32_t alive = alive_.load(std::memory_order_acquire);
  if (alive == 0) return outcome() == Status::Ok ? Status::PeerGone : outcome();
  out.plan = staged_ || remote_staged_ ? plan_staged(total, alive, m.slot)
                                       : plan_stripes(total, alive, m.slot, least_stripe_);
  ++out.number;
  out.traced = posted != 0;
  Record record{};
  record.head = record.tail = out.number;
  record.slot = m.slot;
  record.flag = m.flag;
  record.header = m.header;
  record.header.traced = out.traced ? kTimesInLine : kNotTraced;
  // From here on the message must be sent: a missing number would block all later ones.
  record.before = out.order.load(std::memory_order_relaxed);
  record.order = order_.fetch_add(1, std::memory_order_relaxed) + 1;
  out.order.store(record.order, std::memory_order_relaxed);
  record.stripes = out.plan.count;
  for (std::size_t i = 0; remote_staged_ && i < m.part_count; ++i)
    record.extents[i] = {m.parts[i].offset, m.parts[i].nbytes};
  if (out.traced) {
    record.times = times_of(m, posted);
    record.times.sent = static_cast<int64_t>(trace_now_ns());
  }
  std::memcpy(record_at(index), &record, sizeof record);
  for (uint32_t i = 0; i < out.plan.count; ++i)
    out.path[i].store(static_cast<uint8_t>(out.plan.stripes[i].qp), std::memory_order_relaxed);
  out.open.store(all_stripes(out.plan.count), std::memory_order_release);
  return Status::Ok;
}

Status VerbsLink::wait_sent(uint32_t slot, int64_t timeout_us) {
  const uint32_t index = slot - first_;
  if (slot < first_ || index >= out_.size()) return Status::BadHeader;
  return wait_acknowledged(out_[index], deadline_after_us(timeout_us));
}

Status VerbsLink::wait_acknowledged(const Outgoing& out, uint64_t deadline) {
  for (int spins = 0;; ++spins) {
    if (outcome() != Status::Ok) return outcome();
    if (closed_.load(std::memory_order_acquire)) return Status::Closed;
    if (out.open.load(std::memory_order_acquire) == 0) return Status::Ok;
    if (spins < kSpins) continue;
    const EventCount::Waiter waiter(progress_);
    if (out.open.load(std::memory_order_seq_cst) == 0 || outcome() != Status::Ok) continue;
    const uint64_t now = now_ns();
    if (now >= deadline) return Status::Deadline;
    waiter.sleep(std::min(deadline - now, kSleepSliceNs));
    if (options_.interrupt != nullptr && options_.interrupt()) return Status::Deadline;
  }
}

const VerbsLink::Outgoing* VerbsLink::window_is_full() {
  const uint32_t last = order_.load(std::memory_order_relaxed);
  if (last - floor_.load(std::memory_order_relaxed) < kOrderWindow / 2 - kMaxThreads)
    return nullptr;
  uint32_t oldest = last + 1;
  const Outgoing* waits = nullptr;
  for (const Outgoing& out : out_) {
    const uint32_t order = out.order.load(std::memory_order_relaxed);
    if (out.open.load(std::memory_order_acquire) == 0 || static_cast<int32_t>(order - oldest) >= 0)
      continue;
    oldest = order;
    waits = &out;
  }
  floor_.store(oldest - 1, std::memory_order_relaxed);
  return last - (oldest - 1) < kOrderWindow / 2 - kMaxThreads ? nullptr : waits;
}

Status VerbsLink::wait_window(uint64_t deadline) {
  while (const Outgoing* const oldest = window_is_full()) {
    const Status done = wait_acknowledged(*oldest, deadline);
    if (done != Status::Ok) return done;
  }
  return Status::Ok;
}

void VerbsLink::send_stripe(uint32_t index, uint32_t stripe, uint32_t to) {
  Outgoing& out = out_[index];
  Path& path = *paths_[to];
  Piece pieces[kMaxPieces];
  const std::size_t piece_count =
      cut_stripe(out.parts, out.part_count, out.plan.stripes[stripe], most_piece_, pieces);
  ib::SendWr requests[kMaxWrs];
  ib::Sge sges[kMaxWrs];
  const RequestId id{index, static_cast<uint8_t>(out.number), static_cast<uint8_t>(stripe),
                     static_cast<uint8_t>(to)};
  std::size_t count = 0;
  const auto add = [&](const void* data, uint64_t nbytes, const VerbsSource& source,
                       uint64_t remote, uint32_t rkey) {
    ib::SendWr& request = requests[count];
    sges[count] = {reinterpret_cast<uintptr_t>(data), static_cast<uint32_t>(nbytes),
                   source.keys[path.nic].lkey()};
    request = {};
    request.wr_id = encode_id(id);
    request.sg_list = &sges[count];
    request.num_sge = nbytes != 0 ? 1 : 0;
    request.opcode = ib::kWrite;
    if (source.host && nbytes <= path.qp->max_inline()) request.send_flags = ib::kInline;
    request.remote_addr = remote;
    request.rkey = rkey;
    if (count != 0) requests[count - 1].next = &request;
    ++count;
  };
  const uint64_t payload = remote_payload_ + (first_ + index) % payloads_ * stride_;
  for (std::size_t i = 0; i < piece_count; ++i) {
    const Piece& piece = pieces[i];
    add(static_cast<const uint8_t*>(out.parts[piece.part].data) + piece.from, piece.nbytes,
        *out.sources[piece.part], payload + piece.offset, path.payload_rkey);
  }
  const std::size_t plain = out.traced ? kTracedRecordBytes : kPlainRecordBytes;
  if (stripe == 0)
    add(record_at(index), remote_staged_ ? sizeof(Record) : plain, *sources_[0],
        remote_records_ + index * kRecordStride, path.records_rkey);
  ib::SendWr& last = requests[count - 1];
  last.opcode = ib::kWriteWithImm;
  last.send_flags |= ib::kSignaled;
  last.imm_data = htonl(encode(Immediate{index, id.tag, id.stripe}));

  const auto needed = static_cast<int32_t>(count);
  if (path.room.fetch_sub(needed, std::memory_order_acq_rel) < needed) {
    path.room.fetch_add(needed, std::memory_order_acq_rel);
    lose(out, stripe, to);  // for now
    return;
  }
  out.requests[stripe].store(static_cast<uint16_t>(count), std::memory_order_relaxed);
  if (path.qp->post_send(requests)) return;
  fail_path(to, ib::kWcFlushed);
  lose(out, stripe, to);
}

// On a progress thread, or during set-up.
void VerbsLink::on_completion(const ib::Wc& wc) {
  const RequestId id = decode_id(wc.wr_id);
  if (wc.status != ib::kWcSuccess) fail_path(id.path, wc.status);
  if (id.stripe == kProbeStripe) {
    if (wc.status == ib::kWcSuccess) paths_[id.path]->tested.store(true, std::memory_order_release);
    progress_.notify();
    return;
  }
  Outgoing& out = out_[id.index];
  const uint32_t bit = 1u << id.stripe;
  // The stripe may have been sent again over another path.
  if (!(out.open.load(std::memory_order_acquire) & bit) ||
      out.path[id.stripe].load(std::memory_order_acquire) != id.path ||
      static_cast<uint8_t>(out.number) != id.tag)
    return;
  if (wc.status != ib::kWcSuccess) {
    lose(out, id.stripe, id.path);
    return;
  }
  paths_[id.path]->room.fetch_add(out.requests[id.stripe].load(std::memory_order_relaxed),
                                  std::memory_order_acq_rel);
  if (out.open.fetch_and(~bit, std::memory_order_acq_rel) == bit) progress_.notify();
}

void VerbsLink::lose(Outgoing& out, uint32_t stripe, uint32_t path) {
  auto expected = static_cast<uint8_t>(path);
  if (out.path[stripe].compare_exchange_strong(expected, static_cast<uint8_t>(path | kLost),
                                               std::memory_order_acq_rel))
    wake_control();
}

void VerbsLink::fail_path(uint32_t path, int error) {
  const uint32_t bit = 1u << path;
  int none = 0;
  paths_[path]->error.compare_exchange_strong(none, error, std::memory_order_acq_rel);
  if (!(alive_.fetch_and(~bit, std::memory_order_acq_rel) & bit)) return;
  // Everything else outstanding on this path must complete too.
  paths_[path]->qp->fail();
  wake_control();
}

void VerbsLink::end(Status why, const char* reason) {
  Status open = Status::Ok;
  if (!ended_.compare_exchange_strong(open, why, std::memory_order_acq_rel)) return;
  reason_.store(reason, std::memory_order_release);
  alive_.store(0, std::memory_order_release);
  // From here on no NIC reads the caller's memory.
  for (const auto& path : paths_) path->qp->fail();
  // Tell the receiver too: otherwise its waits would end only at their deadlines.
  shutdown(fd_.get(), SHUT_RDWR);
  progress_.notify();
}

std::string VerbsLink::notes() const {
  std::string notes = notes_;
  const auto add = [&notes](const std::string& note) {
    notes += (notes.empty() ? "" : "; ") + note;
  };
  for (const auto& path : paths_) {
    const int error = path->error.load(std::memory_order_acquire);
    if (error == 0 || !path->tested.load(std::memory_order_acquire)) continue;
    add("path " + path->qp->port().name + " to " + path->peer_port + " failed (" +
        nics_[path->nic]->verbs().wc_status_str(error) + ")");
  }
  const char* reason = reason_.load(std::memory_order_acquire);
  if (reason != nullptr) add(std::string("the link ended: ") + reason);
  return notes;
}

void VerbsLink::wake_control() const {
  const uint64_t one = 1;
  static_cast<void>(!write(wake_.get(), &one, sizeof one));
}

void VerbsLink::close() {
  // A forked child's copy of this object must not end its parent's connection.
  if (getpid() != creator_) return;
  const uint64_t deadline = deadline_after_us(std::min(options_.timeout_us, kLingerUs));
  for (const Outgoing& out : out_)
    if (!closed_ && wait_acknowledged(out, deadline) != Status::Ok) break;
  if (closed_.exchange(true, std::memory_order_acq_rel)) return;
  end(Status::Closed, "it was closed here");
  wake_control();
}

VerbsLink::~VerbsLink() {
  if (getpid() != creator_) {
    // In a forked child: none of the threads exists here, and the device's memory belongs to the
    // parent.
    control_.detach();
    for (auto& path : paths_) static_cast<void>(path.release());
    for (auto& queue : queues_) static_cast<void>(queue.release());
    for (auto& source : sources_) new std::shared_ptr<const VerbsSource>(std::move(source));
    for (auto& nic : nics_) new std::shared_ptr<Nic>(std::move(nic));
    return;
  }
  close();
  if (control_.joinable()) control_.join();
  for (const auto& queue : queues_) queue->detach();
  paths_.clear();
  queues_.clear();
  sources_.clear();
  if (bounce_ != nullptr) munmap(bounce_, bounce_bytes_);
}

}  // namespace afd_comm
