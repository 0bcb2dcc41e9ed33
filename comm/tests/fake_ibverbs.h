// Queue pairs, queues and the simulated wire of fake_ibverbs.cc.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../src/verbs_abi.h"

namespace ib = afd_comm::ib;

namespace {

constexpr int kDevices = 2;
constexpr uint32_t kMaxMessage = 1 << 20;
constexpr uint32_t kMaxInline = 220;

std::mutex world;  // guards everything below and every queue
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
  bool armed = false;
  void push(const ib::Wc& wc) {
    done.push_back(wc);
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
};

struct FakeQp : ib::Qp {
  int index = 0;  // device
  uint32_t peer = 0;
  uint32_t recv_limit = 0;
  uint32_t send_limit = 0;
  bool connected = false;
  bool failed = false;
  bool stop = false;
  std::deque<Request> sends;
  std::deque<uint64_t> receives;
  std::condition_variable changed;
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
    for (const Request& r : sends) complete(send_queue(), r.wr.wr_id, ib::kWcFlushed, 0);
    sends.clear();
    for (const uint64_t id : receives) complete(recv_queue(), id, ib::kWcFlushed, 0);
    receives.clear();
  }
  void run();
};

struct FakeMr : ib::Mr {
  unsigned access;
};

std::map<uint32_t, FakeQp*> qps;
std::map<uint32_t, FakeMr*> regions;  // by rkey

void FakeQp::run() {
  std::unique_lock<std::mutex> lock(world);
  while (true) {
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
    const auto other = qps.find(peer);
    FakeQp* to = other != qps.end() ? other->second : nullptr;
    const bool reachable =
        to != nullptr && !to->failed && to->connected && !port_down[index] && !port_down[to->index];
    Request request = std::move(sends.front());
    sends.pop_front();
    if (!reachable) {
      complete(send_queue(), request.wr.wr_id, ib::kWcRetryExceeded, 0);
      fail();
      continue;
    }
    const bool immediate = request.wr.opcode == ib::kWriteWithImm;
    if (immediate && to->receives.empty()) {
      sends.push_front(std::move(request));  // receiver not ready: retry later
      lock.unlock();
      usleep(100);
      lock.lock();
      continue;
    }
    if (request.wr.num_sge != 0) {
      const auto region = regions.find(request.wr.rkey);
      const FakeMr* mr = region != regions.end() ? region->second : nullptr;
      const uint64_t at = request.wr.remote_addr,
                     base = mr ? reinterpret_cast<uint64_t>(mr->addr) : 0;
      if (mr == nullptr || !(mr->access & ib::kRemoteWrite) || at < base ||
          at + request.sge.length > base + mr->length) {
        complete(send_queue(), request.wr.wr_id, ib::kWcRemoteAccess, 0);
        fail();
        continue;
      }
      const void* from = request.copied.empty() ? reinterpret_cast<void*>(request.sge.addr)
                                                : request.copied.data();
      std::memcpy(reinterpret_cast<void*>(at), from, request.sge.length);
      if (immediate && damage_at >= 0) {
        std::memcpy(reinterpret_cast<uint8_t*>(at) + damage_at, &damage, sizeof damage);
        damage_at = -1;
      }
    }
    if (immediate) {
      to->complete(to->recv_queue(), to->receives.front(), ib::kWcSuccess, ib::kWcRecvWithImm,
                   request.wr.imm_data);
      to->receives.pop_front();
    }
    if (ack_lost[index]) {
      complete(send_queue(), request.wr.wr_id, ib::kWcRetryExceeded, 0);
      fail();
    } else if (request.wr.send_flags & ib::kSignaled) {
      complete(send_queue(), request.wr.wr_id, ib::kWcSuccess, ib::kWcWrite);
    }
  }
}

}  // namespace
