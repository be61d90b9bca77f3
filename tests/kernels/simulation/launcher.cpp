// Runs kernels on threads of the CPU. The job comes on the standard input, in lines of these kinds:
//
// memory FILE NBYTES ADDRESS map this file at this address
// errors FILE                the standard error output
// clock ADDRESS              the Clock lies there
// jitter SEED US             see Jitter
// rank NUMBER                the next launches are of this rank, one after the other; ranks run at once
// launch NAP_US LIBRARY ENTRY BLOCKS THREADS ADDRESSES...   ADDRESSES are those of the kernel's parameters
//
// Exits with 0 when all kernels are over.
//
// `launcher serve` carries out a job after the other, each in a process of its own. A line `job FIBERS LINES` comes before
// each, and the answer is the status of its process, as of waitpid. ThreadSanitizer takes a millisecond for each fiber,
// because it writes to 2 MiB. Processes of the server get them from it.

#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <iostream>
#include <list>
#include <sstream>
#include <string>
#include <thread>

#include "launch.hpp"

namespace {

struct Rank {
  unsigned number;
  std::vector<cpu::Launch> launches;
  char sync[2]{};
};

[[noreturn]] void fail(const std::string& what) {
  fprintf(stderr, "launcher: %s\n", what.c_str());
  exit(2);
}

int open_file(const std::string& file) {
  const int fd = open(file.c_str(), O_RDWR);
  if (fd < 0) fail(file + " cannot be opened");
  return fd;
}

void map(const std::string& file, size_t nbytes, size_t address) {
  void* const wanted = reinterpret_cast<void*>(address);
  const int fd = open_file(file);
  if (mmap(wanted, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, fd, 0) != wanted) {
    fail("the memory cannot be mapped where it has to be");
  }
}

cpu::Launch launch_of(std::istream& words) {
  cpu::Launch launch{};
  std::string library, name;
  words >> launch.nap_us >> library >> name >> launch.blocks >> launch.threads;
  void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  void* const entry = handle ? dlsym(handle, name.c_str()) : nullptr;
  if (!entry) fail(dlerror());
  launch.entry = reinterpret_cast<void (*)(void* const*)>(entry);
  for (size_t address; words >> address;) launch.parameters.push_back(reinterpret_cast<void*>(address));
  return launch;
}

// The last block of a rank that ends a kernel calls it, so that the time does not go on before all blocks begin the next.
struct ComeBack {
  cpu::Clock* clock;
  unsigned rank, blocks;
  void operator()() noexcept {
    for (unsigned index = 0; index < blocks; ++index) clock->next_turn(rank, index) = clock->ticks.load();
  }
};

void run_blocks(std::list<Rank>& ranks, const cpu::Jitter& jitter, cpu::Clock& clock) {
  std::list<std::barrier<ComeBack>> barriers;
  std::vector<std::thread> threads;
  for (Rank& rank : ranks) {
    unsigned blocks = 0, most_threads = 0;
    for (const cpu::Launch& launch : rank.launches) {
      blocks = std::max(blocks, launch.blocks);
      most_threads = std::max(most_threads, launch.threads);
    }
    ComeBack come_back{&clock, rank.number, blocks};
    come_back();
    std::barrier<ComeBack>& all_over = barriers.emplace_back(blocks, come_back);
    for (unsigned index = 0; index < blocks; ++index) {
      threads.emplace_back([&rank, &all_over, &jitter, &clock, index, most_threads] {
        prctl(PR_SET_TIMERSLACK, 1);
        cpu::Block block(rank.number, index, most_threads, rank.sync, jitter, clock);
        for (const cpu::Launch& launch : rank.launches) {
          if (launch.nap_us > 0) cpu::sleep_us(launch.nap_us);
          block.run(launch);
          block.stay_away();
          if (&launch != &rank.launches.back()) all_over.arrive_and_wait();
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
}

void carry_out(std::istream& job) {
  std::list<Rank> ranks;
  cpu::Jitter jitter{};
  cpu::Clock* clock = nullptr;
  for (std::string line; std::getline(job, line);) {
    std::istringstream words(line);
    std::string what;
    words >> what;
    if (what == "memory") {
      std::string file;
      size_t nbytes, address;
      words >> file >> nbytes >> address;
      map(file, nbytes, address);
    } else if (what == "errors") {
      std::string file;
      words >> file;
      dup2(open_file(file), STDERR_FILENO);
    } else if (what == "clock") {
      size_t address;
      words >> address;
      clock = reinterpret_cast<cpu::Clock*>(address);
    } else if (what == "jitter") {
      words >> jitter.seed >> jitter.us;
    } else if (what == "rank") {
      words >> ranks.emplace_back().number;
    } else if (what == "launch" && !ranks.empty()) {
      ranks.back().launches.push_back(launch_of(words));
    } else {
      fail("a line makes no sense: " + line);
    }
  }
  if (!clock) fail("there is no clock");
  run_blocks(ranks, jitter, *clock);
}

[[noreturn]] void serve() {
  for (std::string word; std::cin >> word;) {
    unsigned fibers, lines;
    std::cin >> fibers >> lines >> std::ws;
    std::stringstream job;
    for (std::string line; lines > 0 && std::getline(std::cin, line); --lines) job << line << "\n";
    cpu::make_fibers(fibers);
    // ThreadSanitizer watches no more after fork() where there are fibers, which it takes for threads.
    const pid_t process = _Fork();
    if (process == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      carry_out(job);
      _exit(0);
    }
    int status = -1;
    if (process < 0 || waitpid(process, &status, 0) != process) fail("no process for a job");
    std::cout << status << std::endl;
  }
  exit(0);
}

}  // namespace

int main(int arguments, char**) {
  if (arguments > 1) serve();
  carry_out(std::cin);
  return 0;
}
