// Backend verbs, receiver: the way of a message from its stripes' completions to its doorbell.
#include <arpa/inet.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "afd_comm/link.h"
#include "packed_times.h"
#include "trace_clock.h"
#include "verbs_connection.h"

namespace afd_comm {

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

// On a progress thread.
void VerbsConnection::on_completion(const ib::Wc& wc) {
  const auto index = static_cast<std::size_t>(static_cast<uint32_t>(wc.wr_id));
  Half& half = *halves_[index];
  // Flushed receives of a closed half. If a half failed by itself, the sender reports it.
  if (wc.status != ib::kWcSuccess || wc.opcode != ib::kWcRecvWithImm) {
    if (wc.wr_id & kMarker) half.drained.store(true, std::memory_order_release);
    return;
  }
  const Immediate immediate = decode(ntohl(wc.imm_data));
  if (immediate.stripe != kProbeStripe) arrived(immediate);
  // After the doorbell, which a stream waits for: the NIC has receives to spare.
  half.qp->post_recv(wc.wr_id);
}

void VerbsConnection::arrived(Immediate immediate) {
  if (immediate.slot >= incoming_.size() || immediate.stripe >= kMaxStripes) return complain();
  std::atomic<uint64_t>& state = incoming_[immediate.slot].arrivals;
  uint64_t before = state.load(std::memory_order_acquire);
  uint64_t after = 0;
  do {
    after = with_arrival(before, immediate.tag, immediate.stripe);
    if (after == before) return;
  } while (!state.compare_exchange_weak(before, after, std::memory_order_acq_rel));
  // Without the leading stripe the record is not there yet.
  if (stripes_of(after) & 1) read_record(immediate, stripes_of(after));
}

void VerbsConnection::read_record(Immediate immediate, uint32_t stripes) {
  Record record;
  const uint8_t* source = records_ + immediate.slot * kRecordStride;
  std::memcpy(&record, source, sizeof record);
  // The record was overwritten: the sender gave this message up, and the next message's immediates
  // follow.
  if (record.head != record.tail || static_cast<uint8_t>(record.head) != immediate.tag) return;
  if (record.stripes == 0 || record.stripes > kMaxStripes) return complain();
  // Exactly one stripe completes the set, so exactly one progress thread delivers.
  const bool complete = stripes == all_stripes(record.stripes);
  if (!complete && landing_ == nullptr) return;
  const Geometry& g = host_.memory.geometry();
  Message message;
  message.slot = slots_.first + immediate.slot;
  message.flag = record.flag;
  if (record.slot != message.slot ||
      check_message(message, g.slots, g.slot_bytes, slots_) != Status::Ok ||
      record.header.nbytes < 0 || static_cast<uint64_t>(record.header.nbytes) > g.slot_bytes)
    return complain();
  if (landing_ != nullptr && !land(record, stripes)) return complain();
  if (complete) deliver_in_turn(record);
}

// Starts the copies of the stripes that are in host memory.
bool VerbsConnection::land(const Record& record, uint32_t stripes) {
  const Turn turn(turning_);
  try {
    return holds_slot(record) && landing_->start(record, stripes);
  } catch (const CommError&) {
    return false;
  }
}

void VerbsConnection::deliver_in_turn(const Record& record) {
  const Turn turn(turning_);
  const auto inside = [this](uint32_t order) { return order - next_ < kOrderWindow; };
  uint32_t& newest = incoming_[record.slot - slots_.first].newest;
  const auto ahead = static_cast<int32_t>(record.head - newest);
  // A record names the turn of the slot's previous message. If that message was overwritten before
  // this process saw it (because the process was stopped), the turn before it is unknown, and all
  // later messages would wait for it forever. If it is not ahead, another NIC's thread has already
  // handled it.
  if (ahead <= 0 || ahead > 2 || !inside(record.order)) return ahead > 0 ? complain() : void();
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
}

// A complete message, in its turn. Under turning_.
void VerbsConnection::deliver(const Record& record) {
  if (landing_ == nullptr) return ring(record);
  try {
    if (landing_->full()) {
      landing_->finish();
      ring_landed();
    }
    landing_->expect(record);
  } catch (const CommError&) {
    return complain();
  }
  first_poller().wake();
}

// On the first NIC's progress thread: whether the device has copied a message.
bool VerbsConnection::poll() {
  if (!armed() || turning_.test_and_set(std::memory_order_acquire)) return false;
  bool any = false;
  try {
    any = ring_landed();
  } catch (const CommError&) {
    complain();
  }
  turning_.clear(std::memory_order_release);
  return any;
}

// Returns whether there was a message. Under turning_.
bool VerbsConnection::ring_landed() {
  bool any = false;
  while (const Record* const record = landing_->landed()) {
    ring(*record);
    landing_->pop();
    any = true;
  }
  return any;
}

// A newer writer may have claimed the slot.
bool VerbsConnection::holds_slot(const Record& record) const {
  return serial_ == 0 || holds_claim(host_.memory, record.slot, serial_);
}

// The message's bytes are where they belong. Under turning_.
void VerbsConnection::ring(const Record& record) {
  if (!holds_slot(record)) return complain();
  // Bytes that could not be flushed must not be announced.
  if (broken_.load(std::memory_order_relaxed)) return;
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
