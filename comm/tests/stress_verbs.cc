// Backend verbs under a sanitizer: both ends in one process, over the fake libibverbs, whose ports
// fail at random. Usage: stress_verbs FAKE_LIBRARY [SECONDS]
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "stress.h"

using namespace afd_comm;

namespace {

constexpr uint32_t kSlots = 3;
constexpr uint64_t kBytes = 1 << 20;

VerbsOptions options(const std::string& library) {
  VerbsOptions verbs;
  verbs.host = "127.0.0.1";
  verbs.ports = {"fake0:1", "fake1:1"};
  verbs.stripe_bytes = 4096;
  verbs.library = library;
  return verbs;
}

template <typename Function>
Function fault(void* fake, const char* name) {
  auto function = reinterpret_cast<Function>(dlsym(fake, name));
  check(function != nullptr, name);
  return function;
}

std::unique_ptr<Link> open(const Region& region, const std::string& library, SlotRange slots) {
  LinkOptions link;
  link.backend = "verbs";
  link.slots = slots;
  link.timeout_us = kTimeoutUs;
  link.trace = true;
  link.verbs = options(library);
  return open_link(region.addresses(), link);
}

// One sender per slot posts from registered memory while ports go down and acknowledgements get
// lost. A link that lost all its paths is reopened, and its message is posted again.
void failing_ports(const std::string& library, double seconds) {
  void* fake = dlopen(library.c_str(), RTLD_NOW);
  check(fake != nullptr, "dlopen of the fake library");
  const auto port = fault<void (*)(const char*, int)>(fake, "fake_port");
  const auto lose_acks = fault<void (*)(const char*, int)>(fake, "fake_lose_acks");
  Region region(kSlots, kBytes, [&] {
    RegionOptions made;
    made.name = "failing";
    made.verbs = options(library);
    return made;
  }());
  const uint64_t end = now_ns() + static_cast<uint64_t>(seconds * 1e9);
  std::atomic<uint64_t> taken{0}, reopened{0};
  std::vector<std::thread> threads;
  for (uint32_t slot = 0; slot < kSlots; ++slot)
    threads.emplace_back([&, slot] {
      std::vector<uint8_t> data(kBytes);
      std::unique_ptr<Link> link;
      const auto connect = [&] {  // the ports may be down already
        for (int tries = 0; link == nullptr; ++tries) try {
            link = open(region, library, SlotRange{slot, 1});
            link->register_memory(data.data(), data.size(), Device{});
          } catch (const CommError& error) {
            check(tries < 10000, error.what());
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
      };
      connect();
      std::mt19937 random(slot);
      for (uint32_t seq = 1; now_ns() < end; ++seq) {
        const uint64_t flag = make_flag(1, seq);
        const std::size_t n = random() % kBytes + 1;
        link->wait_sent(slot, kTimeoutUs);
        std::fill(data.begin(), data.begin() + static_cast<std::ptrdiff_t>(n),
                  static_cast<uint8_t>(seq));
        Message message;
        message.slot = slot;
        message.flag = flag;
        message.header.nbytes = static_cast<int64_t>(n);
        message.parts[0] = Part{0, data.data(), n};
        message.part_count = 1;
        while (link->post(message) != Status::Ok ||
               await(region, slot, flag, kTimeoutUs) != Status::Ok) {
          link.reset();
          connect();
          ++reopened;
        }
        check(region.header(slot).nbytes == static_cast<int64_t>(n), "header");
        for (std::size_t i = 0; i < n; ++i)
          check(region.payload(slot)[i] == static_cast<uint8_t>(seq), "payload");
        ++taken;
      }
    });
  threads.emplace_back([&] {
    std::mt19937 random(99);
    while (now_ns() < end) {
      const char* device = random() % 2 ? "fake0" : "fake1";
      const auto& change = random() % 2 ? port : lose_acks;
      const bool is_port = change == port;
      change(device, is_port ? 0 : 1);
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
      change(device, is_port ? 1 : 0);
      std::this_thread::sleep_for(std::chrono::milliseconds(random() % 60));
    }
  });
  for (auto& thread : threads) thread.join();
  printf("failing ports ok: %llu messages, %llu links reopened\n",
         static_cast<unsigned long long>(taken.load()),
         static_cast<unsigned long long>(reopened.load()));
}

// The region is closed, and two links take the slots from each other, while messages are in flight.
void close_in_use(const std::string& library, int rounds) {
  for (int i = 0; i < rounds; ++i) {
    RegionOptions made;
    made.name = "closing";
    made.verbs = options(library);
    Region region(2, kBytes, made);
    std::vector<std::thread> threads;
    std::atomic<uint32_t> up{0};
    for (int n = 0; n < 2; ++n)
      threads.emplace_back([&] {
        std::unique_ptr<Link> link;
        try {
          link = open(region, library, SlotRange{0, 2});
        } catch (const CommError&) {
          ++up;  // the other link took the slots during the handshake
          return;
        }
        const std::vector<uint8_t> data(kBytes / 2, 1);
        ++up;
        Status status = Status::Ok;
        for (uint32_t seq = 1; status == Status::Ok; ++seq)
          status = post(*link, seq % 2, make_flag(1, seq), data);
        check(status == Status::Closed || status == Status::PeerGone, "status at close");
      });
    while (up < 2) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    region.close();
    for (auto& thread : threads) thread.join();
  }
  printf("close in use ok\n");
}

}  // namespace

int main(int argc, char** argv) {
  check(argc > 1, "usage: stress_verbs FAKE_LIBRARY [SECONDS]");
  failing_ports(argv[1], argc > 2 ? atof(argv[2]) : 5);
  close_in_use(argv[1], 10);
  return 0;
}
