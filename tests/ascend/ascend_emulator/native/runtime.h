// Shared by the files of the emulated runtime only: streams, events, graphs and the lock that guards them all.
#pragma once
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"
#include "emulator.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace emulator {

struct Graph;
struct Stream;

struct Event {
  bool external = false;    // may be waited for and recorded from different graphs and streams
  uint64_t issued = 0;      // number of the last record that was queued
  uint64_t recorded = 0;    // number of the last record that has run; 1/0 for an external event
  Graph* capture = nullptr;  // the capture this event was recorded in: it then orders streams of that capture only
  Stream* stream = nullptr;  // where it was recorded last
  double milliseconds = 0;
};

struct Task {
  enum class Kind { kRun, kWaitEvent, kRecordEvent, kResetEvent, kWaitValue, kWriteValue };
  Kind kind = Kind::kRun;
  std::string name;
  Run run;
  Event* event = nullptr;
  uint64_t number = 0;                   // of an event's record, or the value waited for or written
  volatile uint32_t* address = nullptr;  // of that value
};
using TaskPtr = std::shared_ptr<Task>;

struct Graph {
  std::vector<TaskPtr> tasks;
  std::map<uint64_t, std::vector<TaskPtr>> groups;  // task groups that may be updated between replays
  std::set<Stream*> streams;                        // while capturing
  bool active = false;
};

struct TaskGroup {
  Graph* graph;
  uint64_t id;
};

struct Stream {
  int id = 0;
  std::deque<TaskPtr> queue;
  bool running = false;                 // a thread executes a task of this stream
  Graph* capture = nullptr;             // the graph that tasks are recorded into
  uint64_t open_group = 0;              // the task group that recorded tasks belong to, 0 = none
  std::vector<TaskPtr>* update = nullptr;  // the task group that is being replaced
  size_t update_position = 0;
};

extern std::recursive_mutex mutex;
extern std::condition_variable_any changed;
extern std::set<Stream*> streams;
using Lock = std::unique_lock<std::recursive_mutex>;

Stream* stream_of(void* handle);
bool deferring();                      // tasks run only when somebody waits for them
void enqueue(Stream* stream, TaskPtr task);
void run_pending(Stream* stream);      // as far as possible without waiting
int drain(Stream* stream, const char* who);  // until it is empty
int wait_for(const std::function<bool()>& done, Stream* stream, const char* who);
double now_milliseconds();

}  // namespace emulator
