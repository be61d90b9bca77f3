// Runs kernels on threads of the CPU. Carries out jobs that come on the standard input, each in a process of its own: a
// line `jobs NUMBER FIBERS`, and so many times a line `job NBYTES` and a text of lines of these kinds:
//
// errors FILE                the standard error output
// memory FILE NBYTES ADDRESS map this file at this address
// clock ADDRESS              the Clock lies there
// jitter SEED US             see Jitter
// mistake NUMBER             the mistake that kernels make, of those that they can make
// rank NUMBER                the next launches are of this rank, one after the other; ranks run at once
// launch NAP_US LIBRARY ENTRY BLOCKS THREADS ADDRESSES...   ADDRESSES are those of the kernel's parameters
//
// When all kernels are over, the answer is a line with the status of each process, as of waitpid. If one process fails,
// the others end, which may wait for it for ever. ThreadSanitizer takes a millisecond for each fiber, because it writes
// to 2 MiB. Processes get them from this one.
//
// Every fresh machine compiles this first: C++17, and no streams, keep that short.

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <list>
#include <thread>
#include <vector>

#include "launch.hpp"

namespace {

struct Rank {
  unsigned number;
  std::vector<cpu::Launch> launches;
  char sync[2]{};
};

[[noreturn]] void fail(const char* what, const char* name = "") {
  fprintf(stderr, "launcher: %s %s\n", what, name);
  exit(2);
}

// Reads a line of a job, word by word.
class Words {
 public:
  explicit Words(char* line) : word_(strtok_r(line, " \n", &rest_)) {}
  explicit operator bool() const { return word_ != nullptr; }
  const char* text() {
    const char* const word = word_;
    if (!word) fail("a line of the job is too short");
    word_ = strtok_r(nullptr, " \n", &rest_);
    return word;
  }
  unsigned long long number() { return strtoull(text(), nullptr, 10); }

 private:
  char* rest_;
  char* word_;
};

int open_file(const char* file) {
  const int fd = open(file, O_RDWR);
  if (fd < 0) fail("cannot open", file);
  return fd;
}

void map(const char* file, size_t nbytes, size_t address) {
  void* const wanted = reinterpret_cast<void*>(address);
  const int fd = open_file(file);
  if (mmap(wanted, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, fd, 0) != wanted) {
    fail("the memory cannot be mapped where it has to be");
  }
}

cpu::Launch launch_of(Words& words) {
  cpu::Launch launch{};
  launch.nap_us = words.number();
  const char* const library = words.text();
  void* const handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  void* const entry = handle ? dlsym(handle, words.text()) : nullptr;
  if (!entry) fail(dlerror());
  launch.entry = reinterpret_cast<void (*)(void* const*)>(entry);
  launch.blocks = words.number();
  launch.threads = words.number();
  while (words) launch.parameters.push_back(reinterpret_cast<void*>(words.number()));
  return launch;
}

// Where the blocks of a rank meet after each kernel. The time does not go on before all of them begin the next one.
struct Meeting {
  Meeting(cpu::Clock& clock, unsigned rank, unsigned blocks) : clock(clock), rank(rank), blocks(blocks) {
    pthread_barrier_init(&barrier, nullptr, blocks);
    come_back();
  }
  void come_back() {
    for (unsigned index = 0; index < blocks; ++index) clock.next_turn(rank, index) = clock.ticks.load();
  }
  void all_over() {
    if (pthread_barrier_wait(&barrier) == PTHREAD_BARRIER_SERIAL_THREAD) come_back();
    pthread_barrier_wait(&barrier);
  }

  cpu::Clock& clock;
  const unsigned rank, blocks;
  pthread_barrier_t barrier;
};

void run_blocks(std::list<Rank>& ranks, const cpu::Jitter& jitter, cpu::Clock& clock) {
  std::list<Meeting> meetings;
  std::vector<std::thread> threads;
  for (Rank& rank : ranks) {
    unsigned blocks = 0, most_threads = 0;
    for (const cpu::Launch& launch : rank.launches) {
      if (launch.blocks > blocks) blocks = launch.blocks;
      if (launch.threads > most_threads) most_threads = launch.threads;
    }
    Meeting& meeting = meetings.emplace_back(clock, rank.number, blocks);
    for (unsigned index = 0; index < blocks; ++index) {
      threads.emplace_back([&rank, &meeting, &jitter, &clock, index, most_threads] {
        prctl(PR_SET_TIMERSLACK, 1);
        cpu::Block block(rank.number, index, most_threads, rank.sync, jitter, clock);
        for (const cpu::Launch& launch : rank.launches) {
          if (launch.nap_us > 0) cpu::sleep_us(launch.nap_us);
          block.run(launch);
          block.stay_away();
          if (&launch != &rank.launches.back()) meeting.all_over();
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
}

void carry_out(FILE* job) {
  std::list<Rank> ranks;
  cpu::Jitter jitter{};
  cpu::Clock* clock = nullptr;
  char* line = nullptr;
  for (size_t room = 0; getline(&line, &room, job) > 0;) {
    Words words(line);
    const char* const what = words.text();
    const auto is = [what](const char* kind) { return strcmp(what, kind) == 0; };
    if (is("memory")) {
      const char* const file = words.text();
      const size_t nbytes = words.number();
      map(file, nbytes, words.number());
    } else if (is("errors")) {
      dup2(open_file(words.text()), STDERR_FILENO);
    } else if (is("clock")) {
      clock = reinterpret_cast<cpu::Clock*>(words.number());
    } else if (is("jitter")) {
      jitter.seed = words.number();
      jitter.us = words.number();
    } else if (is("mistake")) {
      cpu::mistake = words.number();
    } else if (is("rank")) {
      ranks.emplace_back().number = words.number();
    } else if (is("launch") && !ranks.empty()) {
      ranks.back().launches.push_back(launch_of(words));
    } else {
      fail("a line makes no sense:", what);
    }
  }
  if (!clock) fail("there is no clock");
  run_blocks(ranks, jitter, *clock);
}

std::vector<char> next_job() {
  size_t nbytes = 0;
  if (scanf(" job %zu\n", &nbytes) != 1) fail("there is no job");
  std::vector<char> text(nbytes);
  if (fread(text.data(), 1, nbytes, stdin) != nbytes) fail("there is only a part of a job");
  return text;
}

// ThreadSanitizer watches no more after fork() where there are fibers, which it takes for threads, but after _Fork().
pid_t begin(std::vector<char>& job) {
  const pid_t process = _Fork();
  if (process < 0) fail("no process for a job");
  if (process > 0) return process;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  carry_out(fmemopen(job.data(), job.size(), "r"));
  _exit(0);
}

void carry_out_all(unsigned number) {
  std::vector<std::vector<char>> jobs;
  std::vector<pid_t> processes;
  std::vector<int> statuses(number, -1);
  while (jobs.size() < number) jobs.push_back(next_job());
  for (std::vector<char>& job : jobs) processes.push_back(begin(job));
  for (unsigned over = 0; over < number; ++over) {
    int status = 0;
    const pid_t process = waitpid(-1, &status, 0);
    for (unsigned each = 0; each < number; ++each) {
      if (processes[each] == process) {
        statuses[each] = status;
        processes[each] = 0;
      } else if (status != 0 && processes[each] != 0) {
        kill(processes[each], SIGKILL);
      }
    }
  }
  for (int status : statuses) printf("%d ", status);
  printf("\n");
  fflush(stdout);
}

}  // namespace

int main() {
  for (unsigned number, fibers; scanf(" jobs %u %u", &number, &fibers) == 2;) {
    cpu::make_fibers(fibers);
    carry_out_all(number);
  }
  return 0;
}
