/*
 * Promela model of the mail between the ranks of one rail, a rank on each of N nodes (docs/protocol.md, Between nodes).
 *
 * One phase, frames or sums: the phases share no word. Properties, as assertions and as "no invalid end state":
 *   (a) no put changes a landing while its rank reads it, and no two puts of different bytes to a landing are under way
 *   (b) what a rank reads in a round are the whole bytes of that round
 *   (c) nobody dies and no wait times out: every rank completes every round
 *   (d) otherwise every live rank terminates, and completes no round of which (b) does not hold
 *
 *   -DN=2|3 -DROUNDS=3 -DPIECES=1|2 nodes, rounds, puts of one mail; the header is in the last piece
 *   -DPARITIES=1|2                  landings that rounds use by turns: with 2, two rounds are sent before the first is
 *                                   read, and puts, which find the landing themselves, look at ABORT
 *   -DQUEUED                        an engine whose puts and "free" are all queued by the host: a put has ended when the
 *                                   stream is behind it, and "free" is said after a failure, too. With one parity: each
 *                                   landing of sums is counted by itself
 *   -DSLOW                          any unsatisfied wait may time out at any moment
 *   -DOTHER                         rank 0 sets its ABORT at some moment: a kernel of another stream has given up
 *   -DDEATH                         rank 0 stops for ever at some moment; what it has put may arrive or not, and a wait
 *                                   for a rank that is dead, or that has given up, may time out
 *   -DNEAR                          what ranks other than 0 put to each other arrives at once
 *   -DLATE_SOURCE                   a put reads its source when it arrives, not when the stream passes it
 *   -DMUTANT=...                    one rule broken; the search must then find an error. That ids are copied after
 *                                   "free", or by `dispatch_wait`, is FREE_EARLY here
 *
 * A rank's stream has, for each round, steps in this order: wait for every peer's "free", pack, put, wait for every
 * peer's signals, compare headers, read, say "free". The host has queued all of them, so puts are made whatever the
 * kernels find; a kernel looks at ABORT and then writes and reads nothing. A piece arrives at any later moment, in any
 * order with other pieces, and its signal behind it: who looks in between cannot tell it from a piece that is late. A
 * landing is TORN from the moment in which other bytes than it has are issued, the earliest in which they may come.
 */

#ifndef N
#define N 2
#endif
#ifndef ROUNDS
#define ROUNDS 3
#endif
#ifndef PIECES
#define PIECES 2
#endif
#ifndef PARITIES
#define PARITIES 1
#endif
#define TORN 255
#define HEADER (PIECES - 1)

#define NONE 0
#define NO_FREE_WAIT 1   /* pack does not wait for "free" */
#define PACK_ANYWAY 2    /* pack writes although a wait for "free" has failed */
#define NO_HEADER 3      /* headers are not compared */
#define LAST_SIGNAL 4    /* only the last piece of a mail is signaled */
#define ONE_WORD 5       /* the pieces of a mail share a word, which counts all signals */
#define FREE_EARLY 6     /* "free" is said before the reading has ended */
#define WAIT_PREVIOUS 7  /* signals are awaited of the round before */
#define HEADER_FIRST 8   /* the header is written before the other bytes */
#define FEW_PIECES 9     /* a rank without tokens, here rank 0 in round 2, puts only the last piece */
#define ONE_LANDING 10   /* with two parities: all rounds use the first one's landings */
#define ONE_SOURCE 11    /* with two parities: all rounds use the first one's sending buffers */
#define FREE_BEFORE 12   /* pack waits for "free" of the round before the one that it overwrites */
#define SENDS_AHEAD 13   /* a round is put before the one before it is awaited, as with two parities */
#define READ_FIRST 14    /* a rank reads before it waits for signals and compares headers */
#define MOVED 15         /* where a piece lands depends on the length of the frame, which each round has its own */
#ifndef MUTANT
#define MUTANT NONE
#endif

byte own[N * PARITIES * PIECES]; /* round of the bytes in a rank's sending buffer, by piece */
byte landing[N * N * PARITIES * PIECES];/* at rank, of rank, piece: the same where they arrive */
byte on_way[N * N * PARITIES * PIECES], bytes[N * N * PARITIES * PIECES]; /* pieces that have been issued to there, and their bytes */
byte arrived[N * N * PIECES];/* at rank, of rank, piece: signals */
byte freed[N * N];           /* at rank, by rank: rounds that it has read */
bool reading[N * N * PARITIES];/* at rank, of rank */
bool abort[N], dead[N];
byte completed[N], ended;

#if MUTANT == SENDS_AHEAD
#define OUTSTANDING 2
#else
#define OUTSTANDING PARITIES
#endif
#if MUTANT == FREE_BEFORE
#define UNREAD (PARITIES + 1)
#else
#define UNREAD PARITIES
#endif
#define AT(i, j) ((i) * N + (j))
#define TURN(n) (MUTANT == ONE_LANDING -> 0 : (n) % PARITIES)
#define SOURCE(n) (MUTANT == ONE_SOURCE -> 0 : (n) % PARITIES)
#define CELL(i, j, n, p) ((AT(i, j) * PARITIES + TURN(n)) * PIECES + (p))
#define OWN(i, n, p) (((i) * PARITIES + SOURCE(n)) * PIECES + (p))
#define WORD(i, j, p) (AT(i, j) * PIECES + (p))

#define HAS_READ(i, j) (freed[AT(i, j)] + UNREAD >= n)
#if MUTANT == ONE_WORD
#define HAS_ARRIVED(i, j) (arrived[WORD(i, j, HEADER)] >= PIECES * m)
#elif MUTANT == LAST_SIGNAL || PIECES == 1
#define HAS_ARRIVED(i, j) (arrived[WORD(i, j, HEADER)] >= m)
#elif MUTANT == WAIT_PREVIOUS
#define HAS_ARRIVED(i, j) (arrived[WORD(i, j, 0)] >= m - 1 && arrived[WORD(i, j, 1)] >= m - 1)
#else
#define HAS_ARRIVED(i, j) (arrived[WORD(i, j, 0)] >= m && arrived[WORD(i, j, 1)] >= m)
#endif

#ifdef SLOW
#define MAY_TIME_OUT(j) true
#else
#define MAY_TIME_OUT(j) (dead[j] || abort[j])
#endif

/* Whether what is put there now changes a landing. */
#if MUTANT == MOVED
#define CHANGES(i, j, n, p) (landing[CELL(i, j, n, p)] != bytes[CELL(i, j, n, p)] || (p != HEADER && bytes[CELL(i, j, n, p)] != n))
#else
#define CHANGES(i, j, n, p) (landing[CELL(i, j, n, p)] != bytes[CELL(i, j, n, p)])
#endif

inline check_whole(i, j) {
    p = 0;
    do
    :: p < PIECES -> assert(landing[CELL(i, j, m, p)] == m); p++ /* (b) */
    :: else -> break
    od
}

/* A piece arrives, and then its signal: one step. */
inline arrive(i, j, n, p) {
#ifdef LATE_SOURCE
    assert(own[OWN(i, n, p)] == bytes[CELL(j, i, n, p)]);
#endif
    landing[CELL(j, i, n, p)] = bytes[CELL(j, i, n, p)];
    on_way[CELL(j, i, n, p)]--;
    if
    :: on_way[CELL(j, i, n, p)] == 0 -> bytes[CELL(j, i, n, p)] = 0
    :: else
    fi;
    if
    :: MUTANT == LAST_SIGNAL && p != HEADER -> skip
    :: MUTANT == ONE_WORD -> arrived[WORD(j, i, HEADER)]++
    :: else -> arrived[WORD(j, i, p)]++
    fi
}

/* The host's stream of rank i issues a piece to rank j. */
inline put(i, j, n, p) {
    assert(on_way[CELL(j, i, n, p)] == 0 || bytes[CELL(j, i, n, p)] == own[OWN(i, n, p)]); /* (a) */
    bytes[CELL(j, i, n, p)] = own[OWN(i, n, p)];
    on_way[CELL(j, i, n, p)]++;
    if
    :: CHANGES(j, i, n, p) && on_way[CELL(j, i, n, p)] == 1 ->
        assert(!reading[AT(j, i) * PARITIES + TURN(n)]); /* (a) */
        landing[CELL(j, i, n, p)] = TORN
    :: else
    fi;
#ifdef NEAR
    if
    :: i != 0 && j != 0 -> arrive(i, j, n, p)
    :: else
    fi
#endif
}

/* With two parities all of a round arrives before anything of the next: its signals are stores in stream order. */
#if PARITIES == 2
#define IS_LATER(n, q, p) (on_way[CELL(j, i, 1 - (n), q)] == 0 || bytes[CELL(j, i, 1 - (n), q)] > bytes[CELL(j, i, n, p)])
#define IS_NEXT(n, p) (IS_LATER(n, 0, p) && IS_LATER(n, HEADER, p))
#else
#define IS_NEXT(n, p) true
#endif

/* What rank i has issued to rank j arrives at some moments, in any order; of a dead rank it may be lost. */
proctype Way(byte i; byte j) {
end:
    do
    :: on_way[CELL(j, i, 0, HEADER)] > 0 && IS_NEXT(0, HEADER) -> d_step { arrive(i, j, 0, HEADER) }
#if PIECES == 2
    :: on_way[CELL(j, i, 0, 0)] > 0 && IS_NEXT(0, 0) -> d_step { arrive(i, j, 0, 0) }
#endif
#if PARITIES == 2
    :: on_way[CELL(j, i, 1, HEADER)] > 0 && IS_NEXT(1, HEADER) -> d_step { arrive(i, j, 1, HEADER) }
#if PIECES == 2
    :: on_way[CELL(j, i, 1, 0)] > 0 && IS_NEXT(1, 0) -> d_step { arrive(i, j, 1, 0) }
#endif
#endif
#ifdef DEATH
    :: dead[i] -> break
#endif
    od
}

inline say_free(i) {
    d_step { /* at once: a peer may look later */
        j = 0;
        do
        :: j < N ->
            if
            :: j != i && MUTANT != FREE_EARLY -> freed[AT(j, i)]++
            :: else
            fi;
            j++
        :: else -> break
        od
    }
}

inline may_die() {
#ifdef DEATH
    if
    :: i == 0 -> dead[i] = true; goto over
    :: skip
    fi
#else
    skip
#endif
}

proctype Rank(byte i) {
    byte n = 1, m, j, p;
    do
    :: n > ROUNDS + OUTSTANDING - 1 -> break
    :: else ->
        if
        :: n > ROUNDS -> goto await
        :: else
        fi;
        may_die();
        /* wait for "free", of one peer after the other */
        j = 0;
        do
        :: atomic { j == N -> break }
        :: atomic { j < N && (j == i || abort[i] || MUTANT == NO_FREE_WAIT || HAS_READ(i, j)) -> j++ }
        :: atomic {
            j < N && j != i && !abort[i] && !HAS_READ(i, j) && MAY_TIME_OUT(j) ->
            abort[i] = MUTANT != PACK_ANYWAY;
            j++
        }
        od;
        /* pack: bytes, then the header, each unless ABORT */
        if
        :: abort[i] -> skip
        :: else ->
            d_step {
                p = 0;
                do
                :: p < HEADER -> own[OWN(i, n, p)] = TORN; p++
                :: p == HEADER ->
                    if
                    :: MUTANT == HEADER_FIRST -> own[OWN(i, n, p)] = n
                    :: else
                    fi;
                    p++
                :: else -> break
                od
            };
            if
            :: abort[i] -> skip
            :: else ->
                d_step {
                    p = 0;
                    do
                    :: p < PIECES -> own[OWN(i, n, p)] = n; p++
                    :: else -> break
                    od
                }
            fi
        fi;
        may_die();
        /* put: to all peers in one step, as their delays differ anyway */
        d_step {
            j = 0;
            do
            :: j < N ->
                p = 0;
                do
                :: p < PIECES ->
                    if
                    :: j == i || (PARITIES == 2 && abort[i]) || (MUTANT == FEW_PIECES && i == 0 && n == 2 && p != HEADER) -> skip
                    :: else -> put(i, j, n, p)
                    fi;
                    p++
                :: else -> break
                od;
                j++
            :: else -> break
            od
        };
#ifdef QUEUED
        j = 0;
        do
        :: atomic { j == N -> break }
        :: atomic { j < N && on_way[CELL(j, i, n, 0)] == 0 && on_way[CELL(j, i, n, HEADER)] == 0 -> j++ }
        od;
#endif
        may_die();
await:
        if
        :: n < OUTSTANDING -> n++; goto next
        :: else -> m = n - OUTSTANDING + 1
        fi;
        /* wait for signals; compare headers */
        j = 0;
        do
        :: atomic { j == N -> break }
        :: atomic { j < N && (j == i || abort[i] || MUTANT == READ_FIRST) -> j++ }
        :: atomic {
            j < N && j != i && !abort[i] && MUTANT != READ_FIRST && HAS_ARRIVED(i, j) ->
            abort[i] = MUTANT != NO_HEADER && landing[CELL(i, j, m, HEADER)] != m;
            j++
        }
        :: atomic { j < N && j != i && !abort[i] && !HAS_ARRIVED(i, j) && MAY_TIME_OUT(j) -> abort[i] = true; j++ }
        od;
        /* read, and say "free" */
        if
#ifdef QUEUED
        :: abort[i] -> say_free(i)
#else
        :: abort[i] -> skip
#endif
        :: else ->
            d_step {
                j = 0;
                do
                :: j < N ->
                    if
                    :: j != i ->
                        reading[AT(i, j) * PARITIES + TURN(m)] = MUTANT != FREE_EARLY;
                        check_whole(i, j);
                        if
                        :: MUTANT == FREE_EARLY -> freed[AT(j, i)]++
                        :: else
                        fi
                    :: else
                    fi;
                    j++
                :: else -> break
                od
            };
            may_die();
            d_step {
                j = 0;
                do
                :: j < N ->
                    if
                    :: j != i ->
                        check_whole(i, j);
                        reading[AT(i, j) * PARITIES + TURN(m)] = false
                    :: else
                    fi;
                    j++
                :: else -> break
                od;
                completed[i] = m
            };
            say_free(i)
        fi;
        n++;
next:   skip
    od;
over:
    ended++
}

#ifdef OTHER
proctype Other() { abort[0] = true }
#endif

init {
    byte k = 0, m;
    atomic {
        do
        :: k < N ->
            run Rank(k);
            m = 0;
            do
            :: m < N && m != k -> run Way(k, m); m++
            :: m < N && m == k -> m++
            :: m == N -> break
            od;
            k++
        :: else -> break
        od;
#ifdef OTHER
        run Other()
#endif
    };
    ended == N;
#if !defined(SLOW) && !defined(OTHER) && !defined(DEATH)
    k = 0;
    do
    :: k < N -> assert(completed[k] == ROUNDS); k++ /* (c) */
    :: else -> break
    od
#endif
}
