// Stress of the core library, meant to run under a sanitizer (see stress.sh). Ends with 0 or says
// what broke.
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "../src/socket.h"
#include "../src/tcp_wire.h"
#include "afd_comm/link.h"
#include "afd_comm/region.h"

using namespace afd_comm;

namespace {

constexpr int64_t kTimeoutUs = 10000000;
constexpr uint64_t kSlotBytes = 100000;

void check(bool ok, const char* what) {
  if (ok) return;
  fprintf(stderr, "stress: failed: %s\n", what);
  _exit(1);
}

std::unique_ptr<Link> connect(const Region& region, const char* backend, SlotRange slots) {
  LinkOptions options;
  options.backend = backend;
  options.slots = slots;
  options.timeout_us = kTimeoutUs;
  return open_link(region.addresses(), options);
}

Status post(Link& link, uint32_t slot, uint64_t flag, const std::vector<uint8_t>& data) {
  Message message;
  message.slot = slot;
  message.flag = flag;
  message.header.nbytes = static_cast<int64_t>(data.size());
  message.parts[0] = Part{0, data.data(), data.size() / 2};
  message.parts[1] =
      Part{data.size() / 2, data.data() + data.size() / 2, data.size() - data.size() / 2};
  message.part_count = 2;
  return link.post(message);
}

Status await(Region& region, uint32_t slot, uint64_t flag, int64_t timeout_us) {
  Awaited awaited{slot, flag, Status::Deadline};
  region.wait(&awaited, 1, WaitFor::All, deadline_after_us(timeout_us), nullptr);
  return awaited.status;
}

// Each slot has its own sender and receiver; the receiver checks every byte and then asks for the
// next.
void integrity(const char* backend, uint32_t rounds) {
  constexpr uint32_t slots = 3;
  Region region(slots, kSlotBytes, {"integrity", "127.0.0.1", 0});
  std::vector<std::atomic<uint32_t>> wanted(slots);
  std::vector<std::thread> threads;
  for (uint32_t slot = 0; slot < slots; ++slot) {
    threads.emplace_back([&, slot] {
      const auto link = connect(region, backend, SlotRange{slot, 1});
      std::mt19937 random(slot);
      for (uint32_t seq = 1; seq <= rounds; ++seq) {
        while (wanted[slot].load(std::memory_order_acquire) < seq) std::this_thread::yield();
        std::vector<uint8_t> data(random() % kSlotBytes + 1, static_cast<uint8_t>(seq + slot));
        check(post(*link, slot, make_flag(1, seq), data) == Status::Ok, "post");
      }
      while (wanted[slot].load(std::memory_order_acquire) <= rounds) std::this_thread::yield();
    });
    threads.emplace_back([&, slot] {
      for (uint32_t seq = 1; seq <= rounds; ++seq) {
        wanted[slot].store(seq, std::memory_order_release);
        check(await(region, slot, make_flag(1, seq), kTimeoutUs) == Status::Ok, "arrival");
        const auto bytes = static_cast<uint64_t>(region.header(slot).nbytes);
        for (uint64_t i = 0; i < bytes; ++i)
          check(region.payload(slot)[i] == static_cast<uint8_t>(seq + slot), "payload");
      }
      wanted[slot].store(rounds + 1, std::memory_order_release);
    });
  }
  for (auto& thread : threads) thread.join();
}

// Links of both backends take the same slots from each other while others wait, wake and look.
void churn(uint64_t milliseconds) {
  Region region(2, 64, {"churn", "127.0.0.1", 0});
  const uint64_t end = now_ns() + milliseconds * 1000000;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&, i] {
      const std::vector<uint8_t> data(64, 1);
      for (uint32_t seq = 1; now_ns() < end; ++seq) {
        const auto link = connect(region, i % 2 ? "tcp" : "shm", SlotRange{0, 2});
        const Status status =
            post(*link, seq % 2, make_flag(static_cast<uint32_t>(i) + 1, seq), data);
        check(status == Status::Ok || status == Status::Closed || status == Status::PeerGone,
              "status of a rival");
      }
    });
  threads.emplace_back([&] {
    while (now_ns() < end) {
      await(region, 0, make_flag(9, 9), 500);
      region.gone(1);
    }
  });
  threads.emplace_back([&] {
    while (now_ns() < end) region.wake();
  });
  for (auto& thread : threads) thread.join();
  const auto last = connect(region, "shm", SlotRange{0, 2});
  check(post(*last, 0, make_flag(10, 1), {1, 2}) == Status::Ok, "last link");
  check(await(region, 0, make_flag(10, 1), kTimeoutUs) == Status::Ok, "last arrival");
}

// Frames with random damage from a sender that knows the token.
void hostile(int connections) {
  Region region(3, 256, {"hostile", "127.0.0.1", 0});
  const TcpAddress to = parse_tcp(region.addresses()[1]);
  const SocketAddress address = resolve(to.host, to.port, true);
  std::mt19937_64 random(3);
  for (int i = 0; i < connections; ++i) {
    Fd fd(socket(AF_INET, SOCK_STREAM, 0));
    check(::connect(fd.get(), address.get(), address.length) == 0, "connect");
    Hello hello{kHelloMagic, kTcpVersion, {}, 1, 1};
    std::memcpy(hello.token, to.token.data(), to.token.size());
    FrameHead head{};
    head.magic = kFrameMagic;
    head.slot = 1;
    head.flag = 1;
    head.part_count = 2;
    head.header.nbytes = 200;
    head.parts[0] = {0, 100};
    head.parts[1] = {100, 100};
    uint8_t frame[sizeof head + 200] = {};
    std::memcpy(frame, &head, sizeof head);
    for (uint64_t n = random() % 4; n > 0; --n)
      frame[random() % sizeof head] = static_cast<uint8_t>(random());
    static_cast<void>(send(fd.get(), &hello, sizeof hello, MSG_NOSIGNAL));
    for (int copies = 0; copies < 3; ++copies)
      static_cast<void>(send(fd.get(), frame, sizeof frame, MSG_NOSIGNAL));
  }
  for (uint32_t slot = 0; slot < 3; slot += 2)
    for (uint64_t i = 0; i < 256; ++i)
      check(region.payload(slot)[i] == 0, "a slot the sender had not claimed");
  const auto link = connect(region, "tcp", SlotRange{0, 1});
  check(post(*link, 0, make_flag(1, 1), {1, 2, 3, 4}) == Status::Ok, "post after hostility");
  check(await(region, 0, make_flag(1, 1), kTimeoutUs) == Status::Ok, "arrival after hostility");
}

// The region is closed while it is being waited on and written to.
void close_in_use(int rounds) {
  for (int i = 0; i < rounds; ++i) {
    Region region(2, 4096, {"closing", "127.0.0.1", 0});
    std::vector<std::thread> threads;
    for (uint32_t slot = 0; slot < 2; ++slot) {
      threads.emplace_back([&region, slot] {
        const auto link = connect(region, slot ? "tcp" : "shm", SlotRange{slot, 1});
        const std::vector<uint8_t> data(4096, 1);
        while (post(*link, slot, 1, data) == Status::Ok) {
        }
      });
      threads.emplace_back([&region, slot] {
        const Status status = await(region, slot, make_flag(2, 2), kTimeoutUs);
        check(status == Status::Closed || status == Status::PeerGone, "status at close");
      });
    }
    // Both links must have connected: a doorbell has rung in each slot.
    check(await(region, 0, 1, kTimeoutUs) == Status::Ok &&
              await(region, 1, 1, kTimeoutUs) == Status::Ok,
          "links");
    region.close();
    for (auto& thread : threads) thread.join();
  }
}

// A sender process is killed in the middle of its posts.
void killed_sender(const char* backend, int rounds) {
  Region region(1, kSlotBytes, {"killed", "127.0.0.1", 0});
  for (int i = 0; i < rounds; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      const auto link = connect(region, backend, SlotRange{0, 1});
      const std::vector<uint8_t> data(kSlotBytes, 7);
      for (uint32_t seq = 1;; ++seq)
        post(*link, 0, make_flag(static_cast<uint32_t>(i) + 1, seq), data);
    }
    while (region.header(0).t_arrived == 0) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(10 + i));
    kill(child, SIGKILL);
    const uint64_t since = now_ns();
    check(await(region, 0, make_flag(999, 1), kTimeoutUs) == Status::PeerGone, "gone");
    check(now_ns() - since < 1000000000, "gone in time");
    waitpid(child, nullptr, 0);
  }
}

}  // namespace

int main() {
  for (const char* backend : {"shm", "tcp"}) {
    integrity(backend, 150);
    printf("integrity %s ok\n", backend);
  }
  churn(2000);
  printf("churn ok\n");
  hostile(2000);
  printf("hostile ok\n");
  close_in_use(20);
  printf("close in use ok\n");
#if !defined(__SANITIZE_THREAD__)
  // ThreadSanitizer does not follow a fork of a process with threads, nor two processes at all.
  for (const char* backend : {"shm", "tcp"}) killed_sender(backend, 5);
  printf("killed sender ok\n");
#endif
  return 0;
}
