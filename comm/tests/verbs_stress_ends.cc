// Cases of verbs_stress.cc in which an end dies, is stopped, or is replaced.
#include "verbs_stress.h"

namespace {

void post_for_ever(Shared* shared, const std::string& tx, uint32_t generation) {
  const auto link = connect(*shared, tx, SlotRange{0, kSlots});
  shared->claimed.fetch_add(1);
  const std::vector<uint8_t> data(kMaxBytes, static_cast<uint8_t>(generation));
  for (uint32_t seq = 1;; ++seq) {
    const Status status =
        post(*link, seq % kSlots, make_flag(generation, seq), data.data(), 1 << 20, 1);
    if (status == Status::Closed || status == Status::PeerGone)
      _exit(40 + static_cast<int>(status));
    check(status == Status::Ok, "post");
  }
}

// Senders are killed at random moments, also during the handshake. The receiver must notice the
// death of every sender that was a writer, and the next sender must work normally.
void kill_senders(const std::string& rx, const std::string& tx) {
  constexpr int kills = 6;
  std::vector<Shared*> pages;
  std::vector<pid_t> children;
  for (int i = 0; i <= kills; ++i) {
    Shared* shared = shared_page();
    pages.push_back(shared);
    children.push_back(spawn([&] {
      await_region(shared);
      if (i < kills) post_for_ever(shared, tx, static_cast<uint32_t>(i) + 1);
      const auto link = connect(*shared, tx, SlotRange{0, kSlots});
      shared->claimed.fetch_add(1);
      const std::vector<uint8_t> data(1 << 20, 4);
      check(post(*link, 1, make_flag(1000, 1), data.data(), data.size(), 1) == Status::Ok, "post");
      link->close();
    }));
  }
  const auto region = make_region(rx);
  std::mt19937 random(5);
  double slowest = 0;
  int writers = 0;
  for (int i = 0; i < kills; ++i) {
    publish(pages[i], *region);
    while (i % 3 != 0 && pages[i]->claimed.load() == 0) usleep(1000);
    usleep(random() % 300000);
    const bool writer = pages[i]->claimed.load() != 0;
    kill(children[i], SIGKILL);
    const uint64_t since = now_ns();
    reap(children[i]);
    if (!writer) continue;
    check(await(*region, 0, make_flag(999, 9), kTimeoutUs) == Status::PeerGone,
          "status after the sender's death");
    slowest = std::max(slowest, ms_since(since));
    ++writers;
  }
  publish(pages[kills], *region);
  // Until the next sender has claimed the slots, they belong to a dead writer.
  while (pages[kills]->claimed.load() == 0) {
    usleep(1000);
    check(waitpid(children[kills], nullptr, WNOHANG) == 0,
          "the next sender is running until it connects");
  }
  check(await(*region, 1, make_flag(1000, 1), kTimeoutUs) == Status::Ok,
        "arrival from the next sender");
  check(reap(children[kills]) == 0, "exit status of the next sender");
  printf("kill: the sender's death was seen after %.0f ms at most; %d kills, %d of them writers\n",
         slowest, kills, writers);
}

void kill_receiver(const std::string& rx, const std::string& tx) {
  Shared* second = shared_page();
  const pid_t child = spawn([&] {
    const auto region = make_region(rx);
    publish(second, *region);
    pause();
  });
  await_region(second);
  const auto link = connect(*second, tx, SlotRange{0, kSlots});
  const std::vector<uint8_t> data(1 << 20, 5);
  uint64_t since = 0;
  Status status = Status::Ok;
  for (uint32_t seq = 1; status == Status::Ok && seq < 100000; ++seq) {
    if (seq == 20) {
      kill(child, SIGKILL);
      since = now_ns();
    }
    status = post(*link, seq % kSlots, make_flag(1, seq), data.data(), data.size(), 1);
  }
  check(status == Status::PeerGone, "status after the receiver's death");
  check(now_ns() - since < 5000000000u, "the receiver's death is noticed in time");
  printf("kill: the receiver's death was seen after %.0f ms\n",
         static_cast<double>(now_ns() - since) / 1e6);
  check(post(*link, 0, 1, data.data(), 64, 1) == Status::PeerGone,
        "post after the receiver's death");
  reap(child);
}

}  // namespace

void kill_either(const std::string& rx, const std::string& tx) {
  kill_senders(rx, tx);
  kill_receiver(rx, tx);
}

namespace {

// Stops a process and waits until all of its threads have stopped.
void stop_process(pid_t child) {
  check(kill(child, SIGSTOP) == 0, "SIGSTOP");
  check(waitpid(child, nullptr, WUNTRACED) == child, "the process stops");
}

void stop_sender(const std::string& rx, const std::string& tx) {
  Shared* shared = shared_page();
  const pid_t child = spawn([&] {
    await_region(shared);
    const auto link = connect(*shared, tx, SlotRange{0, kSlots});
    shared->claimed.fetch_add(1);
    const std::vector<uint8_t> data(1 << 20, 6);
    for (uint32_t seq = 1; seq <= 2; ++seq) {
      while (shared->wanted[0].load(std::memory_order_acquire) <= seq) usleep(1000);
      check(post(*link, 0, make_flag(1, seq), data.data(), data.size(), 1) == Status::Ok, "post");
    }
    while (shared->stop.load() == 0) usleep(1000);
  });
  const auto region = make_region(rx);
  publish(shared, *region);
  while (shared->claimed.load() == 0) usleep(1000);
  shared->wanted[0].store(2);
  check(await(*region, 0, make_flag(1, 1), kTimeoutUs) == Status::Ok, "arrival before the stop");
  stop_process(child);
  shared->wanted[0].store(3);
  const uint64_t since = now_ns();
  check(await(*region, 0, make_flag(1, 2), 500000) == Status::Deadline,
        "wait for a stopped sender");
  check(ms_since(since) < 1500, "the deadline is kept");
  check(!region->gone(0), "a stopped sender is late, not gone");
  printf("stop: a wait for a stopped sender ended after %.0f ms\n", ms_since(since));
  kill(child, SIGCONT);
  check(await(*region, 0, make_flag(1, 2), kTimeoutUs) == Status::Ok, "arrival after the stop");
  shared->stop.store(1);
  check(reap(child) == 0, "sender");
}

// Messages are posted while the receiver is stopped: one per slot, or with `often` as many as the
// queues accept.
void stop_receiver(const std::string& rx, const std::string& tx, bool often) {
  constexpr int64_t deadline_us = 2000000;
  const uint64_t last = make_flag(1, 9999);
  Shared* shared = shared_page();
  const pid_t child = spawn([&] {
    const auto region = make_region(rx);
    publish(shared, *region);
    for (uint32_t slot = 0; slot < kSlots; ++slot) {
      const Status status = await(*region, slot, last, kTimeoutUs);
      check(status == (often ? Status::PeerGone : Status::Ok), "the receiver's outcome");
      check(often || region->payload(slot)[(1 << 20) - 1] == 8, "payload");
    }
    shared->stop.store(1);
  });
  await_region(shared);
  const auto link = connect(*shared, tx, SlotRange{0, kSlots}, deadline_us);
  const std::vector<uint8_t> before(1 << 20, 7), data(1 << 20, 8);
  check(post(*link, 0, make_flag(1, 1), before.data(), before.size(), 1) == Status::Ok, "post");
  stop_process(child);
  if (!often) {
    for (uint32_t slot = 0; slot < kSlots; ++slot)
      check(post(*link, slot, last, data.data(), data.size(), 1) == Status::Ok,
            "the NIC of a stopped receiver still accepts messages");
    kill(child, SIGCONT);
  } else {
    Status status = Status::Ok;
    uint64_t since = 0;
    uint32_t posted = 0;
    for (; status == Status::Ok && posted < 10000; ++posted) {
      since = now_ns();
      status = post(*link, posted % kSlots, make_flag(2, posted + 1), data.data(), 4096, 1);
    }
    check(status == Status::Deadline, "status of a post to a stopped receiver");
    check(ms_since(since) < 1.5e-3 * deadline_us, "the deadline is kept");
    printf("stop: post %u to a stopped receiver ended after %.0f ms\n", posted, ms_since(since));
    kill(child, SIGCONT);
    // The receiver cannot know which messages it missed, so it must end the link.
    since = now_ns();
    for (status = Status::Ok; status != Status::PeerGone; usleep(1000)) {
      check(ms_since(since) < 5000, "the connection ends");
      status = post(*link, 0, last, data.data(), 64, 1);
    }
    printf("stop: a receiver that missed messages ended the link after %.0f ms\n", ms_since(since));
  }
  check(reap(child) == 0 && shared->stop.load() == 1, "receiver");
}

}  // namespace

void stop_either(const std::string& rx, const std::string& tx) {
  stop_sender(rx, tx);
  stop_receiver(rx, tx, false);
  printf("stop: one message per slot came after the receiver went on\n");
  stop_receiver(rx, tx, true);
}

void late(const std::string& rx, const std::string& tx) {
  Shared* shared = shared_page();
  const pid_t first = spawn([&] {
    await_region(shared);
    post_for_ever(shared, tx, 1);
  });
  const pid_t second = spawn([&] {
    await_region(shared);
    while (shared->claimed.load() == 0) usleep(1000);
    usleep(200000);
    const auto link = connect(*shared, tx, SlotRange{0, kSlots});
    const std::vector<uint8_t> data(kMaxBytes, 2);
    for (uint32_t slot = 0; slot < kSlots; ++slot)
      check(post(*link, slot, make_flag(2, 1), data.data(), 1 << 20, 1) == Status::Ok, "post");
    shared->claimed.fetch_add(1);
    while (shared->stop.load() == 0) usleep(1000);
  });
  const auto region = make_region(rx);
  publish(shared, *region);
  for (uint32_t slot = 0; slot < kSlots; ++slot)
    check(await(*region, slot, make_flag(2, 1), kTimeoutUs) == Status::Ok, "newer writer");
  check(reap(first) == 40 + static_cast<int>(Status::Closed),
        "the older writer's post returns CLOSED");
  // No message of the older generation may arrive after the newer one.
  for (int i = 0; i < 20; ++i) {
    for (uint32_t slot = 0; slot < kSlots; ++slot) {
      check(region->ready(slot, make_flag(2, 1)), "no doorbell of the older generation");
      for (uint64_t at = 0; at < 1 << 20; at += 997)
        check(region->payload(slot)[at] == 2, "no payload of the older generation");
    }
    usleep(20000);
  }
  shared->stop.store(1);
  check(reap(second) == 0, "newer writer");
  printf("late: nothing of the older generation came\n");
}
