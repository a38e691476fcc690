/* Threads that run a whole pass together: phase after phase, each with a number of parts.
 *
 * A phase ends when its parts are done, not when every member has arrived: on a shared machine, a member that was
 * descheduled is not waited for unless it holds a part. It finds that its phase is over, skips to the next, and so
 * catches up. Hence between two calls of `each` a member must do nothing that others see. Which member takes a part is
 * decided at run time (each begins with a share of neighbouring parts), so results must not depend on it.
 */
#ifndef OUTRIDER_TEAM_H
#define OUTRIDER_TEAM_H

#include "vectors.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(_WIN32) /* declared here: the system's header defines macros by the hundred */
#include <process.h>
__declspec(dllimport) int __stdcall SwitchToThread(void);
__declspec(dllimport) unsigned long __stdcall WaitForSingleObject(void *handle, unsigned long milliseconds);
__declspec(dllimport) int __stdcall CloseHandle(void *handle);
#else
#include <pthread.h>
#include <sched.h>
#endif
#if defined(_OPENMP) && !defined(OWN_THREADS)
#include <omp.h>
#endif

enum {
    MEMBERS = 64, /* threads of a team, at most */
    SPINS = 2000, /* polls of a phase before the thread sleeps: some 30 microseconds */
    FUTEX_SLEEP = 128, /* Linux's FUTEX_WAIT and FUTEX_WAKE within a process: not every system has the header */
    FUTEX_ROUSE = 129,
};

typedef struct {
    _Alignas(64) uint64_t claim; /* phase << 32 | started parts of a member's share in it; older: none of this phase */
} Share;

typedef struct { /* all of it only grows, so that nobody has to reset anything between two phases */
    Share shares[MEMBERS];
    _Alignas(64) int64_t done; /* finished parts of all phases */
    _Alignas(64) uint32_t phase; /* the current one */
    uint32_t asleep;
} Team;

typedef struct {
    Team *team; /* shared */
    int64_t me, size;
    uint32_t phase; /* the next one of this member */
    int64_t parts; /* of all phases so far */
} Member;

INLINE void relax(void) {
#if defined(__SSE__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void sleep_in(Team *team, uint32_t phase) {
#if defined(SYS_futex)
    __atomic_add_fetch(&team->asleep, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &team->phase, FUTEX_SLEEP, phase, NULL, NULL, 0); /* returns at once if the phase has changed */
    __atomic_sub_fetch(&team->asleep, 1, __ATOMIC_SEQ_CST);
#else
    (void)team;
    (void)phase;
#if defined(_WIN32)
    SwitchToThread();
#else
    sched_yield();
#endif
#endif
}

/* The member that finishes a phase's last part opens the next. */
static void open_phase(Team *team, uint32_t phase) {
    __atomic_store_n(&team->phase, phase, __ATOMIC_SEQ_CST);
#if defined(SYS_futex)
    if (__atomic_load_n(&team->asleep, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &team->phase, FUTEX_ROUSE, MEMBERS, NULL, NULL, 0);
#endif
}

/* How many parts to claim at once: many while many are left, because every claim waits for the loads before it; one by
 * one at the end, so that no member is late. */
INLINE uint64_t claimed(uint64_t left) { return left > 8 ? left / 4 : 1; }

/* Runs all parts of a job. Every member calls this with the same arguments, in the same order. */
static int each(Member *m, Work work, const void *job, int64_t parts) {
    if (parts <= 0) return 0;
    Team *team = m->team;
    const uint64_t phase = m->phase++;
    const int64_t all_parts = m->parts += parts;
    int failed = 0;
    for (int64_t i = 0; i < m->size; i++) {
        const int64_t owner = (m->me + i) % m->size, first = parts * owner / m->size;
        const uint64_t share = (uint64_t)(parts * (owner + 1) / m->size - first);
        uint64_t *claim = &team->shares[owner].claim, seen = __atomic_load_n(claim, __ATOMIC_ACQUIRE), start;
        while (seen >> 32 <= phase && (start = seen >> 32 == phase ? (uint32_t)seen : 0) < share) {
            const uint64_t n = claimed(share - start);
            if (!__atomic_compare_exchange_n(claim, &seen, (phase << 32) + start + n, 0, __ATOMIC_ACQUIRE,
                                             __ATOMIC_ACQUIRE)) continue;
            for (uint64_t part = start; part < start + n; part++) failed |= work(job, first + (int64_t)part);
            if (__atomic_add_fetch(&team->done, (int64_t)n, __ATOMIC_ACQ_REL) == all_parts)
                open_phase(team, (uint32_t)phase + 1);
            seen = __atomic_load_n(claim, __ATOMIC_ACQUIRE);
        }
    }
    for (int64_t looks = 0; __atomic_load_n(&team->phase, __ATOMIC_ACQUIRE) <= phase; looks++) {
        if (looks < SPINS) relax();
        else sleep_in(team, (uint32_t)phase);
    }
    return failed;
}

typedef int (*Task)(Member *member, const void *job); /* non-zero: no memory */

/* With OWN_THREADS, each call starts its threads: where no OpenMP runtime is shared with torch (macOS, Windows). */
#ifdef OWN_THREADS
typedef struct {
    Task task;
    const void *job;
    Member member;
    int failed;
} Start;

static void run_member(Start *start) {
    PLAIN_MODE;
    start->failed = start->task(&start->member, start->job);
    OLD_MODE;
}

#if defined(_WIN32)
typedef uintptr_t Thread;

static unsigned __stdcall thread_main(void *start) {
    run_member(start);
    free_scratch();
    return 0;
}

INLINE int begin_thread(Thread *thread, Start *start) {
    return !(*thread = _beginthreadex(NULL, 0, thread_main, start, 0, NULL));
}

INLINE void end_thread(Thread thread) {
    WaitForSingleObject((void *)thread, 0xffffffffu);
    CloseHandle((void *)thread);
}
#else
typedef pthread_t Thread;

static void *thread_main(void *start) {
    run_member(start);
    free_scratch();
    return NULL;
}

INLINE int begin_thread(Thread *thread, Start *start) { return pthread_create(thread, NULL, thread_main, start); }

INLINE void end_thread(Thread thread) { pthread_join(thread, NULL); }
#endif

static int together(Task task, const void *job, int64_t threads) {
    const int64_t size = most(1, least(threads, MEMBERS));
    Team team;
    Start starts[MEMBERS];
    Thread ids[MEMBERS];
    int64_t started = 1;
    memset(&team, 0, sizeof team);
    for (int64_t i = 0; i < size; i++) starts[i] = (Start){task, job, {&team, i, size, 0, 0}, 0};
    while (started < size && !begin_thread(ids + started, starts + started)) started++;
    run_member(starts); /* takes the parts of members that could not start, too */
    int failed = starts[0].failed;
    for (int64_t i = 1; i < started; i++) {
        end_thread(ids[i]);
        failed |= starts[i].failed;
    }
    return failed;
}
#else
static int together(Task task, const void *job, int64_t threads) {
    int failed = 0;
    Team team;
    memset(&team, 0, sizeof team);
#ifdef _OPENMP
#pragma omp parallel num_threads((int)most(1, least(threads, MEMBERS))) reduction(| : failed)
    {
        PLAIN_MODE;
        failed |= task(&(Member){&team, omp_get_thread_num(), omp_get_num_threads(), 0, 0}, job);
        OLD_MODE;
    }
#else
    (void)threads;
    PLAIN_MODE;
    failed = task(&(Member){&team, 0, 1, 0, 0}, job);
    OLD_MODE;
#endif
    return failed;
}
#endif

#endif
