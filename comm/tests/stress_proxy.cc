// Pollers, tickets and proxied links under a sanitizer.
// Usage: stress_proxy FAKE_LIBRARY [SECONDS]
#include <dlfcn.h>
#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <thread>

#include "../src/poller.h"
#include "../src/tickets.h"
#include "../src/verbs_progress.h"
#include "stress.h"

using namespace afd_comm;

namespace {

constexpr uint32_t kSlots = 3;
constexpr uint32_t kRows = 64;
constexpr uint64_t kRowBytes = 1000;
constexpr uint64_t kBytes = kRows * kRowBytes;

struct Counter final : Polled {
  bool poll() override {
    check(alive.load(), "a removed item is not polled");
    ++looks;
    return looks % 7 == 0;
  }
  bool armed() const override { return hot.load(); }
  std::atomic<bool> alive{true}, hot{false};
  uint64_t looks = 0;  // of the poller's thread, and of its owner once it is removed
};

// Items come and go while the thread polls, and while it sleeps.
void items_come_and_go(double seconds) {
  const auto poller = Poller::shared();
  const uint64_t end = now_ns() + static_cast<uint64_t>(seconds * 1e9);
  std::vector<std::thread> threads;
  std::atomic<uint64_t> rounds{0};
  for (unsigned n = 0; n < 3; ++n)
    threads.emplace_back([&, n] {
      std::mt19937 random(n);
      while (now_ns() < end) {
        Counter counter;
        counter.hot = random() % 2 == 0;
        poller->add(counter);
        if (random() % 3 == 0)
          std::this_thread::sleep_for(std::chrono::microseconds(random() % 900));
        poller->wake();
        poller->remove(counter);
        counter.alive = false;
        ++rounds;
        if (random() % 9 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
    });
  for (auto& thread : threads) thread.join();
  check(rounds > 10, "a sleeping poller takes changes at once");
  printf("poller ok: %llu items\n", static_cast<unsigned long long>(rounds.load()));
}

// Notes where its poller's thread may run.
struct Place final : Polled {
  bool poll() override {
    if (!known) sched_getaffinity(0, sizeof cpus, &cpus);
    known = true;
    return false;
  }
  bool armed() const override { return !known.load(); }
  cpu_set_t cpus{};
  std::atomic<bool> known{false};
};

// The thread of a NIC runs on the CPUs of the NIC's NUMA node that the process may use.
void a_nic_has_a_thread_on_its_node() {
  const std::vector<int> listed{0, 1, 2, 3, 8, 10, 11};
  check(parse_cpulist("0-3,8,10-11") == listed, "a list of CPUs");
  check(parse_cpulist("").empty(), "an empty list");
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  sched_getaffinity(0, sizeof allowed, &allowed);
  int last = CPU_SETSIZE - 1;
  while (!CPU_ISSET(static_cast<std::size_t>(last), &allowed)) --last;
  std::string name = std::filesystem::temp_directory_path() / "stress_proxy_XXXXXX";
  check(mkdtemp(name.data()) != nullptr, "a folder");
  const std::filesystem::path root(name), node = root / "devices/system/node/node1";
  std::filesystem::create_directories(node);
  std::ofstream(node / "cpulist") << last << ",1022-1023\n";
  for (const auto& [nic, on] : {std::pair("near", "1"), {"far", "7"}, {"none", "-1"}}) {
    const std::filesystem::path device = root / "class/infiniband" / nic / "device";
    std::filesystem::create_directories(device);
    std::ofstream(device / "numa_node") << on << "\n";
  }
  check(cpus_near("near", name) == std::vector<int>{last}, "the node's CPUs that are allowed");
  check(cpus_near("far", name).empty() && cpus_near("none", name).empty(), "an unknown node");
  Place place;
  Poller poller("nic", cpus_near("near", name), 0);
  poller.add(place);
  const uint64_t end = deadline_after_us(kTimeoutUs);
  while (true) {
    while (!place.known && now_ns() < end) std::this_thread::yield();
    // The thread may look once before it is moved.
    if (CPU_COUNT(&place.cpus) == 1 || now_ns() >= end) break;
    place.known = false;
    poller.wake();
  }
  poller.remove(place);
  check(CPU_COUNT(&place.cpus) == 1 && CPU_ISSET(static_cast<std::size_t>(last), &place.cpus),
        "the thread is on the node");
  std::filesystem::remove_all(root);
  printf("node ok\n");
}

// Eager messages come back; captured ones are freed by recording, and the memory is used again.
void tickets_are_used_again() {
  Tickets tickets;
  Prepared eager, captured;
  captured.captured = true;
  check(tickets.find(kNoTicket) == nullptr && tickets.find(1) == nullptr, "no ticket yet");
  std::thread sender;
  for (int i = 0; i < 1000; ++i) {
    const Ticket ticket = tickets.add(eager);
    check(ticket <= 2, "eager tickets are used again");
    std::thread([&tickets, ticket] { tickets.done(ticket); }).join();
  }
  check(!tickets.any(), "nothing is kept");
  Ticket highest = 0;
  for (int graph = 0; graph < 50; ++graph) {
    const uint64_t recording = tickets.record();
    for (uint32_t i = 0; i < 700; ++i) {
      captured.message.slot = i;
      const Ticket ticket = tickets.add(captured);
      check(tickets.find(ticket)->message.slot == i, "the ticket names its message");
      highest = std::max(highest, ticket);
    }
    check(tickets.kept() == 700, "one recording is kept");
    tickets.release(recording);
  }
  check(highest <= 800 && !tickets.any(), "memory does not grow with captures");
  printf("tickets ok\n");
}

VerbsOptions verbs(const std::string& library) {
  VerbsOptions options;
  options.host = "127.0.0.1";
  options.ports = {"fake0:1", "fake1:1"};
  options.stripe_bytes = 4096;
  options.library = library;
  return options;
}

template <typename Function>
Function fault(void* fake, const char* name) {
  auto function = reinterpret_cast<Function>(dlsym(fake, name));
  check(function != nullptr, name);
  return function;
}

std::unique_ptr<Link> open(const Region& region, const char* backend, const std::string& library) {
  LinkOptions link;
  link.tcp_connections = 3;
  link.tcp_stripe_bytes = 4096;
  link.backend = backend;
  link.slots = SlotRange{0, kSlots};
  link.timeout_us = kTimeoutUs;
  link.trace = true;
  link.verbs = verbs(library);
  for (int tries = 0;; ++tries) try {
      return open_link(region.addresses(), link);
    } catch (const CommError& error) {
      check(tries < 10000, error.what());
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

// One thread enqueues on all slots of a link with random counts, another posts on the same link,
// while ports fail at random. A link whose status is not Ok is replaced.
void enqueue_while_ports_fail(const char* backend, const std::string& library, double seconds) {
  void* fake = dlopen(library.c_str(), RTLD_NOW);
  check(fake != nullptr, "dlopen of the fake library");
  const auto port = fault<void (*)(const char*, int)>(fake, "fake_port");
  const auto lose_acks = fault<void (*)(const char*, int)>(fake, "fake_lose_acks");
  RegionOptions made;
  made.name = "proxied";
  made.tcp_host = "127.0.0.1";
  made.verbs = verbs(library);
  Region region(kSlots, kBytes, made);
  const uint64_t end = now_ns() + static_cast<uint64_t>(seconds * 1e9);
  std::atomic<bool> stop{false};
  std::thread faults([&] {
    std::mt19937 random(5);
    while (!stop) {
      const char* device = random() % 2 ? "fake0" : "fake1";
      const bool is_port = random() % 2 != 0;
      (is_port ? port : lose_acks)(device, is_port ? 0 : 1);
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
      (is_port ? port : lose_acks)(device, is_port ? 1 : 0);
      std::this_thread::sleep_for(std::chrono::milliseconds(random() % 60));
    }
  });
  auto link = open(region, backend, library);
  std::mt19937 random(6);
  std::vector<std::vector<uint8_t>> data(kSlots, std::vector<uint8_t>(kBytes));
  std::atomic<uint32_t> words[kSlots];
  uint64_t messages = 0, replaced = 0;
  for (uint32_t generation = 1, seq = 1; now_ns() < end; ++seq) {
    uint64_t flags[kSlots];
    uint32_t rows[kSlots];
    bool good = true;
    std::thread poster;
    for (uint32_t slot = 0; slot < kSlots; ++slot) {
      flags[slot] = make_flag(generation, seq);
      rows[slot] = static_cast<uint32_t>(random() % (kRows + 1));
      words[slot] = rows[slot];
      std::fill(data[slot].begin(), data[slot].end(), static_cast<uint8_t>(seq + slot));
      Message message;
      message.slot = slot;
      message.flag = flags[slot];
      message.header.count = kRows;
      message.header.nbytes = static_cast<int64_t>(kBytes);
      message.parts[0] = Part{0, data[slot].data(), kBytes};
      message.part_count = 1;
      const auto* word = reinterpret_cast<const uint32_t*>(&words[slot]);
      if (slot == kSlots - 1) {
        rows[slot] = kRows;
        poster = std::thread([&link, &good, message] {
          if (link->post(message) != Status::Ok) good = false;
        });
        poster.join();
      } else {
        good = link->enqueue(nullptr, message, word) == Status::Ok && good;
      }
    }
    for (uint32_t slot = 0; slot < kSlots; ++slot)
      // The thread sanitizer does not see that the kernel orders a send before its receive, so the
      // link says when the data may change.
      good = good && await(region, slot, flags[slot], kTimeoutUs) == Status::Ok &&
             link->wait_sent(slot, kTimeoutUs) == Status::Ok;
    if (!good) {
      link.reset();
      link = open(region, backend, library);
      ++generation;
      ++replaced;
      continue;
    }
    for (uint32_t slot = 0; slot < kSlots; ++slot) {
      const Header header = region.header(slot);
      check(header.count == rows[slot], "count");
      check(header.nbytes == static_cast<int64_t>(rows[slot] * kRowBytes), "bytes");
      for (uint64_t i = 0; i < rows[slot] * kRowBytes; ++i)
        check(region.payload(slot)[i] == static_cast<uint8_t>(seq + slot), "payload");
    }
    messages += kSlots;
  }
  stop = true;
  faults.join();
  printf("enqueue over %s ok: %llu messages, %llu links replaced\n", backend,
         static_cast<unsigned long long>(messages), static_cast<unsigned long long>(replaced));
}

}  // namespace

int main(int argc, char** argv) {
  check(argc > 1, "usage: stress_proxy FAKE_LIBRARY [SECONDS]");
  const double seconds = argc > 2 ? atof(argv[2]) : 2;
  tickets_are_used_again();
  a_nic_has_a_thread_on_its_node();
  items_come_and_go(seconds / 3);
  enqueue_while_ports_fail("verbs", argv[1], seconds);
  enqueue_while_ports_fail("tcp", argv[1], seconds / 3);
  printf("proxy ok\n");
  return 0;
}
