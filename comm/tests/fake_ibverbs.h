// Queue pairs, queues and the simulated wire of fake_ibverbs.cc.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../src/verbs_abi.h"
#include "fake_copy.h"
#include "fake_line.h"
#include "fake_lock.h"
#include "fake_remote.h"

namespace ib = afd_comm::ib;

namespace {

constexpr uint32_t kMaxMessage = 1 << 20;
constexpr uint32_t kMaxInline = 220;
// Shorter writes are copied under `world`.
constexpr uint32_t kOwnCopy = 16 << 10;

Lock world;  // guards everything below and every queue
uint32_t next_number = 100;
bool port_down[kDevices];
bool mute[kDevices];      // requests are taken, but neither sent nor completed
bool ack_lost[kDevices];  // the data arrives, but the sender gets a failed completion
int delay_us = 0;
bool receivers_stopped = false;  // data arrives without receive completions
int damage_at = -1;              // byte offset of `damage` in the next record; -1: no damage
uint32_t damage = 0;
int register_errno = 0;
bool devices_refused = false;
std::set<uint64_t> refused_device;  // addresses that were refused as a dma-buf
int dmabufs = 0;
int device_count = kDevices;

struct FakeDevice {
  std::string name;
  int index;
} devices[kDevices] = {{"fake0", 0}, {"fake1", 1}};

struct FakeChannel : ib::CompChannel {
  std::deque<ib::Cq*> events;
};

struct FakeContext : ib::Context {
  int index;
};

struct FakeCq : ib::Cq {
  std::deque<ib::Wc> done;
  std::atomic<std::size_t> count{0};  // of `done`: pollers look at it without the lock
  bool armed = false;
  void push(const ib::Wc& wc) {
    done.push_back(wc);
    count.store(done.size(), std::memory_order_release);
    if (!armed || channel == nullptr) return;
    armed = false;
    static_cast<FakeChannel*>(channel)->events.push_back(this);
    const uint64_t one = 1;
    static_cast<void>(!write(channel->fd, &one, sizeof one));
  }
};

struct Request {
  ib::SendWr wr;
  ib::Sge sge;
  std::vector<uint8_t> copied;  // inline
  Clock::time_point line{};     // when the device's line will have carried it
};

struct FakeQp : ib::Qp {
  int index = 0;  // device
  uint32_t peer = 0;
  int peer_pid = 0;   // 0: this process
  int away = -1;      // connection to it
  uint64_t near = 0;  // an address of the device that sends
  struct Mapping {
    uint64_t base, length, here;
  };
  std::map<uint32_t, Mapping> places;  // by rkey of the other process
  std::vector<uint8_t> scratch;
  uint32_t recv_limit = 0;
  uint32_t send_limit = 0;
  bool connected = false;
  bool failed = false;
  bool stop = false;
  int copying = 0;  // copies from or to this end that `world` is open for
  std::deque<Request> sends;
  std::deque<uint64_t> receives;
  std::condition_variable_any changed;
  std::atomic<uint32_t> posted{0};  // requests, ever
  std::thread wire;

  FakeCq* send_queue() const { return static_cast<FakeCq*>(send_cq); }
  FakeCq* recv_queue() const { return static_cast<FakeCq*>(recv_cq); }
  void complete(FakeCq* cq, uint64_t id, int status, int opcode, uint32_t imm = 0) {
    ib::Wc wc{};
    wc.wr_id = id;
    wc.status = status;
    wc.opcode = opcode;
    wc.imm_data = imm;
    wc.qp_num = qp_num;
    cq->push(wc);
  }
  void fail() {
    failed = true;
    if (away >= 0) shutdown(away, SHUT_RDWR);  // its thread may wait for an answer
    for (const Request& r : sends) complete(send_queue(), r.wr.wr_id, ib::kWcFlushed, 0);
    sends.clear();
    for (const uint64_t id : receives) complete(recv_queue(), id, ib::kWcFlushed, 0);
    receives.clear();
  }
  void run();
  void linger(std::unique_lock<Lock>& lock, uint32_t seen);
  int send_away(const Request& request);
  uint64_t mapped(const fake_remote::Frame& frame);
  bool is_device(const ib::Sge& sge);
};

struct FakeMr : ib::Mr {
  unsigned access;
  bool device;
  int busy;  // copies that use it
};

std::map<uint32_t, FakeQp*> qps;
std::map<uint32_t, FakeMr*> regions;  // by rkey

// Writes into memory of this process that is registered under `rkey`. `bytes`: null if they are
// there already. `lock` of `world` is open while a device, or much, is copied. Returns a status.
int write_here(uint32_t rkey, uint64_t at, const void* bytes, uint32_t length,
               std::unique_lock<Lock>& lock) {
  const auto region = regions.find(rkey);
  if (region == regions.end()) return ib::kWcRemoteAccess;
  FakeMr& mr = *region->second;
  const auto base = reinterpret_cast<uint64_t>(mr.addr);
  if (!(mr.access & ib::kRemoteWrite) || at < base || at + length > base + mr.length)
    return ib::kWcRemoteAccess;
  if (bytes == nullptr || (length >= kOwnCopy && !carries_bytes())) return ib::kWcSuccess;
  const bool device = mr.device && fake_gpu::driver().loaded;
  auto* const to = reinterpret_cast<void*>(at);
  if (!device && length < kOwnCopy) {
    std::memcpy(to, bytes, length);
    return ib::kWcSuccess;
  }
  ++mr.busy;  // keeps the registration
  lock.unlock();
  if (device)
    fake_gpu::copy(at, to, bytes, length);
  else
    fake_copy::copy(to, bytes, length, line_gbps() > 0);
  lock.lock();
  --mr.busy;
  return ib::kWcSuccess;
}

// Waits until no copy reads or writes for this end any more.
void settle(const FakeQp& qp, std::unique_lock<Lock>& lock) {
  while (qp.copying != 0) {
    lock.unlock();
    usleep(10);
    lock.lock();
  }
}

bool takes(const FakeQp* qp) {
  return qp != nullptr && !qp->failed && qp->connected && !port_down[qp->index];
}

FakeQp* find_qp(uint32_t number) {
  const auto found = qps.find(number);
  return found != qps.end() ? found->second : nullptr;
}

// Gives the receiver its immediate. Under `world`.
void give(FakeQp& to, uint32_t imm) {
  to.complete(to.recv_queue(), to.receives.front(), ib::kWcSuccess, ib::kWcRecvWithImm, imm);
  to.receives.pop_front();
}

// Serves one queue pair of another process.
void serve_peer(int fd) {
  using namespace fake_remote;
  Frame frame{};
  std::vector<uint8_t> bytes;
  int status = ib::kWcSuccess;  // the first failure since the last answer
  while (receive(fd, &frame, sizeof frame)) {
    bytes.resize(frame.bytes);
    if (!receive(fd, bytes.data(), bytes.size())) return;
    if (frame.kind == Kind::Describe) {
      Place place;
      {
        const std::lock_guard<Lock> lock(world);
        const auto region = regions.find(frame.rkey);
        if (region != regions.end()) {
          place.base = reinterpret_cast<uint64_t>(region->second->addr);
          place.length = region->second->length;
          place.device = region->second->device && fake_gpu::driver().loaded;
        }
      }
      if (place.device) place.shared = fake_gpu::share(place.base);
      if (!send_all(fd, &place, sizeof place)) return;
      continue;
    }
    {
      std::unique_lock<Lock> lock(world);
      FakeQp* to = find_qp(frame.qpn);
      if (!takes(to)) {
        status = ib::kWcRetryExceeded;
      } else if (frame.kind == Kind::Last && to->receives.empty()) {
        status = kNotReady;
      } else if (status == ib::kWcSuccess) {
        if (frame.length != 0) {
          ++to->copying;
          status = write_here(frame.rkey, frame.addr, bytes.empty() ? nullptr : bytes.data(),
                              frame.length, lock);
          --to->copying;
        }
        to = find_qp(frame.qpn);
        if (!takes(to)) status = ib::kWcRetryExceeded;
        if (status == ib::kWcSuccess && frame.kind == Kind::Last) give(*to, frame.imm);
      }
    }
    if (frame.kind != Kind::Last) continue;
    if (!send_all(fd, &status, sizeof status)) return;
    status = ib::kWcSuccess;
  }
}

// Sends one request to another process. Without `world`. Returns a status.
int FakeQp::send_away(const Request& request) {
  using namespace fake_remote;
  if (away < 0) away = connect_to(peer_pid);
  const bool last = request.wr.opcode == ib::kWriteWithImm;
  const uint32_t length = request.wr.num_sge != 0 ? request.sge.length : 0;
  const bool here_on_device = request.copied.empty() && length != 0 && is_device(request.sge);
  Frame frame{last ? Kind::Last : Kind::Write, peer,   request.wr.rkey, request.wr.imm_data,
              request.wr.remote_addr,          length, length};
  const void* from = request.copied.empty() ? reinterpret_cast<void*>(request.sge.addr)
                                            : static_cast<const void*>(request.copied.data());
  if (here_on_device) {
    if (const uint64_t to = mapped(frame)) {
      fake_gpu::copy(request.sge.addr, reinterpret_cast<void*>(to), from, length);
      frame.bytes = 0;
    } else {
      scratch.resize(length);
      fake_gpu::copy(request.sge.addr, scratch.data(), from, length);
      from = scratch.data();
    }
  }
  wait_until(request.line);
  while (true) {
    int status = ib::kWcSuccess;
    if (!send_all(away, &frame, sizeof frame) || !send_all(away, from, frame.bytes) ||
        (last && !receive(away, &status, sizeof status)))
      return ib::kWcRetryExceeded;
    if (status != kNotReady) return status;
    {
      const std::lock_guard<Lock> lock(world);
      if (stop || failed) return ib::kWcFlushed;
    }
    usleep(100);
  }
}

// Where this process can write the frame's target itself; 0: nowhere.
uint64_t FakeQp::mapped(const fake_remote::Frame& frame) {
  using namespace fake_remote;
  auto known = places.find(frame.rkey);
  if (known == places.end()) {
    Frame ask{Kind::Describe, peer, frame.rkey, 0, 0, 0, 0};
    Place place;
    if (!send_all(away, &ask, sizeof ask) || !receive(away, &place, sizeof place)) return 0;
    Mapping made{place.base, place.length, 0};
    if (place.device && place.shared.usable) made.here = fake_gpu::map(place.shared, near);
    known = places.emplace(frame.rkey, made).first;
  }
  const Mapping& m = known->second;
  const bool inside = frame.addr >= m.base && frame.addr + frame.length <= m.base + m.length;
  return m.here != 0 && inside ? m.here + (frame.addr - m.base) : 0;
}

bool FakeQp::is_device(const ib::Sge& sge) {
  const std::lock_guard<Lock> lock(world);
  const auto region = regions.find(sge.lkey);
  if (region == regions.end() || !region->second->device || !fake_gpu::driver().loaded)
    return false;
  near = sge.addr;
  return true;
}

// Looks for the next request for a while without sleeping, as a NIC does: waking a thread takes as
// long as carrying a message. `seen`: value of `posted` when there was nothing to do.
void FakeQp::linger(std::unique_lock<Lock>& lock, uint32_t seen) {
  if (line_gbps() <= 0) return;
  lock.unlock();
  const auto end = Clock::now() + std::chrono::milliseconds(1);
  while (posted.load(std::memory_order_acquire) == seen && Clock::now() < end) {
  }
  lock.lock();
}

void FakeQp::run() {
  std::unique_lock<Lock> lock(world);
  while (true) {
    if (!stop && connected && sends.empty()) linger(lock, posted.load());
    changed.wait(lock, [this] { return stop || (connected && !sends.empty() && !mute[index]); });
    if (stop) return;
    if (delay_us > 0) {
      const int pause = delay_us * static_cast<int>(1 + qp_num % 3);
      lock.unlock();
      usleep(static_cast<useconds_t>(pause));
      lock.lock();
      if (stop) return;
      if (sends.empty()) continue;
    }
    FakeQp* to = peer_pid == 0 ? find_qp(peer) : nullptr;
    const bool reachable = (peer_pid != 0 || takes(to)) && !port_down[index];
    Request request = std::move(sends.front());
    sends.pop_front();
    if (!reachable) {
      complete(send_queue(), request.wr.wr_id, ib::kWcRetryExceeded, 0);
      fail();
      continue;
    }
    const bool immediate = request.wr.opcode == ib::kWriteWithImm;
    if (peer_pid == 0 && immediate && to->receives.empty()) {
      sends.push_front(std::move(request));  // receiver not ready: retry later
      lock.unlock();
      usleep(100);
      lock.lock();
      continue;
    }
    const uint32_t length = request.wr.num_sge != 0 ? request.sge.length : 0;
    const void* from =
        request.copied.empty() ? reinterpret_cast<void*>(request.sge.addr) : request.copied.data();
    // The bytes may be there early: nobody looks before the immediate.
    int status = ib::kWcSuccess;
    if (peer_pid != 0) {
      lock.unlock();
      status = send_away(request);
      lock.lock();
    } else {
      if (length != 0) {
        ++copying;
        ++to->copying;
        status = write_here(request.wr.rkey, request.wr.remote_addr, from, length, lock);
        --to->copying;
        --copying;
      }
      if (status == ib::kWcSuccess && immediate && damage_at >= 0) {
        std::memcpy(reinterpret_cast<uint8_t*>(request.wr.remote_addr) + damage_at, &damage,
                    sizeof damage);
        damage_at = -1;
      }
      if (request.line > Clock::now()) {
        lock.unlock();
        wait_until(request.line);
        lock.lock();
      }
      to = find_qp(peer);
      if (!takes(to)) status = ib::kWcRetryExceeded;
    }
    if (failed) {
      complete(send_queue(), request.wr.wr_id, ib::kWcFlushed, 0);
      continue;
    }
    if (status != ib::kWcSuccess) {
      complete(send_queue(), request.wr.wr_id, status, 0);
      fail();
      continue;
    }
    if (immediate && peer_pid == 0) give(*to, request.wr.imm_data);
    if (ack_lost[index]) {
      complete(send_queue(), request.wr.wr_id, ib::kWcRetryExceeded, 0);
      fail();
    } else if (request.wr.send_flags & ib::kSignaled) {
      complete(send_queue(), request.wr.wr_id, ib::kWcSuccess, ib::kWcWrite);
    }
  }
}

}  // namespace
