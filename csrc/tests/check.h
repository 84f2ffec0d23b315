// The least a test needs: CHECK, and the tests of each file.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                      \
    }                                                                                    \
  } while (false)

// The exception type that the statement must throw.
#define CHECK_THROWS(type, statement) \
  do {                                \
    bool thrown = false;              \
    try {                             \
      statement;                      \
    } catch (const type&) {           \
      thrown = true;                  \
    }                                 \
    CHECK(thrown);                    \
  } while (false)

void test_threads();
void test_memory();
void test_half();
void test_batch_check();
void test_program();
void test_linear();
void test_neurons();
