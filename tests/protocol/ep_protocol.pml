/*
 * Promela model of the dispatch / combine protocol (docs/protocol.md, docs/memory_model.md).
 *
 * Default: N ranks, ROUNDS dispatch and combine rounds, for spin's exhaustive search.
 * -DGRID:  the second half of this file instead, the CTAs of one rank around its state words.
 *
 * Properties, as assertions and as "no invalid end state":
 *   (a) no payload cell is overwritten before its reader has finished with it
 *   (b) a reader that has passed its wait reads the whole data of its own epoch
 *   (c) nobody dies: no deadlock; no timeout is modelled, so none was needed
 *   (d) a rank dies: every other rank terminates, and completes no round of which an item is missing
 *   (f) no round is sent twice; with -DMISTAKE nobody completes the round of the launch that finds one outstanding
 *       (docs/memory_model.md has (e), of -DGRID)
 *
 *   -DN=2|3 -DROUNDS=3 -DSLICES=1|2       size; with two slices, round SHORT (2) is a shorter round of one slice
 *   -DORDER=SPLIT|STREAMS|ROLES|FUSED|MIXED   the launches of one rank, see below
 *   -DROUTING=ONE|SWING|ALL|SELF          which ranks have rows of a slice: one, which changes from a round to the next
 *                                         of its parity, or to the next; all; of the slices of rank 0 only rank 0, of
 *                                         the others' all
 *   -DEMPTY                               rank 0 has no tokens: it sends a table and no messages, and its combine
 *                                         receives nothing and so waits for nobody
 *   -DDATES=256                           number of different dates; 256 are more than there are rounds
 *   -DLAMPORT=ALL|SOME                    rounds whose rows travel as Lamport words: all; those of some ranks
 *   -DFALLBACK                              some Lamport words are SENTINEL by content, so their slice has a flag
 *   -DCHUNK                               a rank's slices that are not Lamport rows share one flag, signaled behind the last
 *   -DDIRECT                              a fused dispatch sends its own rank nothing: that receives from its input
 *   -DSTAGGERED                              in combine each Lamport slice has a flag, SENTINEL or not, as in chunks
 *   -DFINE                                words signaled, and slices read, one at a time in any order
 *   -DDEATH, -DDOOMED=0                   that rank stops for ever at some point; a wait for a word of a rank that is
 *                                         dead, or that has given up, may time out
 *   -DMISTAKE=ONE|ALL                     rank 0, or every rank, makes a fused launch while its round 2 is sent and
 *                                         not received; a wait for a word of a rank that has given up may time out
 *   -DSLOW                                any unsatisfied wait may time out at any moment
 *   -DPAIRS                               in combine ranks tell each other of which dispatch round their rows are, and
 *                                         compare where rows come home
 *   -DCROSSED                             and rank 0 combines the batches of dispatch rounds 1 and 2 in the other order; a
 *                                         wait for a word of a rank that has given up may time out
 *   -DDISPATCHES=0, -DCOMBINES=0          only the other phase
 *   -DMUTANT=...                          one protocol rule broken; the search must then find an error
 *
 * What is modelled, and why it is enough
 * --------------------------------------
 * Every launch of a rank consists of up to three tasks: ACK (the CTA that signals "consumed"), SEND (the sending CTAs)
 * and RECEIVE (the receiving CTAs). A process for each runs beside the others, because the CTAs of a launch are not
 * ordered. A launch begins when the one before it on its stream has ended, and it has ended when its tasks have. The
 * epoch words move in that last step: no CTA reads them between the last CTA's store and the end of the launch. A
 * combine that sends looks at "consumed" before it begins; that flag only grows, so what suffices then does so later.
 *
 * Payload. A payload cell (a slice of messages; a slice of what returns, in a slot that another rank may fill in
 * another round) holds the epoch whose data it holds, or TORN while stores to it may be on their way. Stores are not
 * ordered among themselves, only before the flag that follows them (st.release.sys): they arrive at any moment between
 * the wait that precedes them and that flag, never after it. So the cells of ALL peers turn TORN in the step that
 * passes the wait (the earliest moment a store can arrive), and a cell turns to n in the step that signals its flag (the
 * latest). Every real arrival lies between, and a reader that looks in between fails an assertion. A slower warp
 * of the same sender passes the same wait later, which only shortens the interval. A chunk has one slice, or with
 * -DCHUNK all of a rank; a warp that has stored its slice takes a step of its own, the last one's signals the flag.
 *
 * Pairs (-DPAIRS). The dispatch round of a rank's rows is one more LL word, of combine. It is waited for beside the
 * slices, in any order, by ranks that have tokens, and a rank that finds another round than its own gives up: nobody completes
 * a round in which rows of two dispatch rounds meet.
 *
 * Own tokens (-DDIRECT). What a fused dispatch gives its own rank is no cell: its input does not change while it runs,
 * which is the order of its stream.
 *
 * LL words. The routing table is one word for header and counts (its words are waited for alike, by every receiving
 * CTA) and one for the entries of each slice. A word holds the epoch of its value; a reader sees no more than the date,
 * the epoch modulo DATES, waits until it is equal to its own, and must then have the value of its own epoch. One store
 * writes both, so a word is never torn.
 *
 * Lamport words. A slice has two, each of which holds SENTINEL or the epoch of its data. A store is one step, at any
 * moment between the wait and the end of the launch. A reader takes the slice when neither word is SENTINEL, or when the
 * flag is there, and then both must be what was sent. (It needs both, so without -DFINE words 0 are stored before
 * words 1.) Clearing is a weak store: it lands at any moment between the read and the release that signals the round as
 * consumed. So a word that was taken is FADING until that step. The own rank's later looks find SENTINEL (stream
 * order); the step in which a peer passes its wait, the earliest moment of a store, asserts that the words are SENTINEL.
 *
 * Flags. A flag has one writer and one reading rank, only grows, and is only compared; a word changes only after its
 * reader has said that it may. Hence a signal that arrives late cannot be told from a reader that polls late, and a rank
 * may signal one item to all its peers in one step: the readers' own steps supply every delay. The exception is a writer
 * that stops between two signals, so the rank that dies may stop after signaling an item to any subset of its peers. -DFINE
 * does without this reduction. The flag of a chunk is signaled at every rank, and waited for only where a slice of it has
 * rows. Lamport slices have one only where they have rows and a word is SENTINEL by content; a reader may, but need not,
 * look at it before it takes them.
 *
 * Reads. A wait is followed by one check of the cell (the earliest read); one more check of all cells comes in the step
 * that ends the launch (the latest read). A cell that holds n at both moments held n in between, because epoch
 * n is written once. For the same reason the waits of several warps for the same words are one wait, and the second
 * pass of a dispatch receive needs no step here: it reads, once more, what was whole. Its meeting is in -DGRID.
 *
 * Timeouts. Warps decide one by one: when one gives up, the others of its task may give up too or go on, and then drop
 * the items of those that gave up; of a Lamport slice word 0 may have been taken by then. A launch that begins after a
 * timeout passes no wait.
 *
 * Termination. Every step advances a process or a word and nothing goes back, so the state graph has no cycle:
 * "no invalid end state" is the proof that every process of every live rank terminates.
 */

#ifndef N
#define N 2
#endif
#ifndef ROUNDS
#define ROUNDS 3
#endif
#ifndef SLICES
#define SLICES 1
#endif
#ifndef SHORT
#define SHORT 2
#endif
#ifndef DATES
#define DATES 256
#endif

#define ONE 0
#define ALL 1
#define SELF 2
#define SOME 3
#define SWING 4
#ifndef ROUTING
#define ROUTING ONE
#endif

/* ORDER: the launches of one rank. Dn An Wn: fused, async, wait of dispatch round n; cn an wn: of combine.
 * SPLIT    halves on one stream, two outstanding: A1 A2 W1 a1 A3 W2 a2 w1 W3 a3 w2 w3
 * STREAMS  dispatch A1 A2 W1 A3 W2 W3 on one stream, combine a1 a2 w1 a3 w2 w3 on another; an after Wn
 * ROLES    D1 D2 c1 D3 c2 c3 (or, AHEAD=0, D1 c1 D2 c2 D3 c3), some CTAs send while others receive
 * FUSED    the same launches, every CTA sends and then receives
 * MIXED    rank 0 like ROLES, the others like SPLIT */
#define SPLIT 0
#define STREAMS 1
#define ROLES 2
#define FUSED 3
#define MIXED 4
#define JOINS 5
#ifndef ORDER
#define ORDER SPLIT
#endif
/* Rounds sent before the first of them is received (three are one too many). */
#ifndef OUTSTANDING
#define OUTSTANDING 2
#endif
#ifndef AHEAD
#define AHEAD 1
#endif
/* The two phases share no word of the arena; one alone is enough for the larger sizes. */
#ifndef DISPATCHES
#define DISPATCHES 1
#endif
#ifndef COMBINES
#define COMBINES 1
#endif

#define NONE 0
#define NO_CONSUMED_WAIT 1   /* senders do not wait before they overwrite */
#define ONE_PARITY 2         /* every round uses the same slots */
#define FLAG_FIRST 3         /* the flag is signaled before the payload has arrived */
#define ACK_OWN_ROUND 4      /* a receiving launch signals its own round as consumed, not the last completed one */
#define ACK_AFTER_WAIT 5     /* a sending launch signals "consumed" after its wait for "consumed" */
#define ACK_ON_RECEIVE 6     /* only launches that receive signal "consumed" */
#define EQUAL 7              /* receivers wait for flag == n, not flag >= n */
#define WAIT_PREVIOUS 8      /* senders wait for n-1, not n-2 */
#define ARENA_HEADER 9       /* combine reads the header from the arena, not from the handle */
#define COMPLETE_ANYWAY 10   /* the last CTA out does not look at the verdicts of the others */
#define STALE_OUTPUT 11      /* GRID: CTAs that find the abort word set leave without being counted */
#define HALF_COUNTER 12      /* GRID: the sending CTAs have an exit counter, and a last CTA, of their own */
#define UNORDERED 13         /* GRID: the announcing CTA counts itself out without a fence */
#define LATE_FENCE 14        /* GRID: the last CTA out retracts without a fence after its add */
#define UNDATED 15           /* receivers take what a word of the routing table holds, whatever its date */
#define TWO_STORES 16        /* a date is stored before its value */
#define WAIT_FOR_ALL 17      /* receivers wait for flags of slices of which there are no rows */
#define SILENT_OWNER 18      /* expert ranks signal what returns only of the first slice */
#define NO_CLEAR 19          /* readers leave Lamport words as they are */
#define WEAK_ACK 20          /* "consumed" does not order the clearing before it */
#define SENTINEL_IS_DATA 21     /* readers take a slice of which one word has arrived */
#define SILENT_FALLBACK 22     /* a slice with a SENTINEL word has no flag */
#define PASS_OVER 23         /* rank 1 does not take a slice, of round 1, that it has no room for */
#define FLAG_ALWAYS 24       /* readers of Lamport words wait for flags */
#define HEEDLESS 25          /* a combine that only receives takes Lamport words that are there, also after a timeout */
#define NO_RESET 26          /* GRID: nobody resets the counters of meeting and messages */
#define EARLY_RESET 27       /* GRID: the announcing CTA resets the grid barrier counter when it leaves, the signaling one that of
                                messages, not the last one out; TURNS: a launch clears the numbers of its own round */
#define SILENT_FAILURE 28    /* GRID: a CTA whose wait failed does not raise the abort word */
#define FAILED_JOINS 29      /* GRID: a CTA whose wait failed comes to the meeting all the same */
#define ALL_MEET 30          /* GRID: the meeting waits for every CTA of the launch, not for those that receive */
#define EARLY_FLAG 31        /* the flag of a chunk is signaled behind its first slice */
#define UNCHECKED 32         /* a fused launch does not compare the rounds sent with those received */
#define ONE_PAIR 33          /* dispatch rounds that ranks tell each other have one word, not one a parity */
#define UNPAIRED 34          /* ranks do not compare them */
#define DIRECT_SPLIT 35      /* a launch that only sends leaves out its own rank, too */
#define OWN_AWAITED 36       /* a rank waits for its own messages, which nobody sends */
#define OWN_SLOT 37          /* a rank takes its own tokens from the slots of its messages */
#define DRAWS_GO_ON 38       /* GRID: nobody resets the counter of messages that receiving CTAs take */
#define DRAWS_FROM_NONE 39   /* GRID: they take those, too, that others begin with */
#ifndef MUTANT
#define MUTANT NONE
#endif

#define SEND 1
#define RECEIVE 2
#define ACK 4

#ifndef GRID

#define TORN 255
#define FADING 254           /* a Lamport word that was taken, until its clearing is sure to be over */
#define SENTINEL 0
#define TABLE 0              /* a word's item: header and counts; c: the entries of slice c */
#define WORDS (SLICES + 1)
#if ORDER == STREAMS
#define QUEUES 2
#else
#define QUEUES 1
#endif
#define LENGTH (4 * ROUNDS + 1)

#if MUTANT == ONE_PARITY
#define parity(n) 0
#else
#define parity(n) ((n) & 1)
#endif

/* Slices of the tokens of rank s in round n, and whether rank d has rows of slice c of them. */
#ifdef EMPTY
#define slices(n, s) ((s) == 0 -> 0 : SLICES - ((SLICES > 1) && ((n) == SHORT)))
#else
#define slices(n, s) (SLICES - ((SLICES > 1) && ((n) == SHORT)))
#endif
#if ROUTING == ONE
#define has_rows(n, s, c, d) (((s) + (c) + (n) / 2) % N == (d))     /* rounds 1 and 3, of one parity, differ */
#define slot(d) 0
#elif ROUTING == SWING
#define has_rows(n, s, c, d) (((s) + (c) + (n)) % N == (d))         /* rounds 1 and 3 agree, round 2 differs */
#define slot(d) 0
#elif ROUTING == ALL
#define has_rows(n, s, c, d) true
#define slot(d) (d)
#else
#define has_rows(n, s, c, d) ((s) != 0 || (d) == 0)
#define slot(d) (d)
#endif

/* Lamport rounds of rank s; its slices whose word 1 is SENTINEL by content. Both change between rounds of one parity. */
#if defined(LAMPORT) && LAMPORT == ALL
#define express(n, s) true
#elif defined(LAMPORT)
#define express(n, s) (((n) / 2 + (s)) % 2 == 0)
#else
#define express(n, s) false
#endif
#ifdef FALLBACK
#define content(n, s, c, w) ((w) && ((n) / 2 + (s) + (c)) % 2 -> SENTINEL : (n))
#else
#define content(n, s, c, w) (n)
#endif

/* The number of a slice's flag; whether it may be signaled at peer p now. Flag 1 means other slices in other rounds. */
#ifdef CHUNK
#define flag_of(phase, owner, writer, item) (by_words(phase, owner, writer) -> (item) : 1)
#else
#define flag_of(phase, owner, writer, item) (item)
#endif
#if defined(CHUNK) && MUTANT != EARLY_FLAG
#define behind_convoy(p) !(todo & (1 << ((SLICES + 1) * N + (p)) | 1 << (2 * SLICES * N + (p))))
#else
#define behind_convoy(p) true
#endif
#ifdef STAGGERED
#define flagged(phase, owner, writer, item) ((phase) == C || sent_word(phase, owner, writer, item, 1) == SENTINEL)
#else
#define flagged(phase, owner, writer, item) (sent_word(phase, owner, writer, item, 1) == SENTINEL)
#endif

/* Arena words. D or C, then the rank that owns the memory, then the rank that writes. */
#define D 0
#define C 1
#define source(phase, owner, writer) ((phase) == D -> (writer) : (owner))     /* whose tokens they are */
#define items(phase, owner, writer) slices(n, source(phase, owner, writer))
#define by_words(phase, owner, writer) express(n, source(phase, owner, writer))
#define sent_word(phase, owner, writer, item, w) content(n, source(phase, owner, writer), item, w)
#define due(phase, owner, writer, item) \
    ((phase) == D -> has_rows(n, writer, item, owner) : has_rows(n, owner, item, writer))
#ifndef DIRECT
#define direct(phase, owner, writer) false
#elif MUTANT == DIRECT_SPLIT
#define direct(phase, owner, writer) ((phase) == D && (owner) == (writer) && (KIND & SEND))
#else
#define direct(phase, owner, writer) ((phase) == D && (owner) == (writer) && FUSES)
#endif
#define travels(phase, owner, writer, item) (due(phase, owner, writer, item) && !direct(phase, owner, writer))
#define place(phase, owner, n, writer, item) \
    (((((phase) * N + (owner)) * 2 + parity(n)) * N + ((phase) == D -> (writer) : slot(writer))) * SLICES + (item) - 1)
#define CELL(phase, owner, n, writer, item) cell[place(phase, owner, n, writer, item)]
#ifdef LAMPORT
#define XWORD(phase, owner, n, writer, item, w) xword[2 * place(phase, owner, n, writer, item) + (w)]
#else
#define XWORD(phase, owner, n, writer, item, w) SENTINEL
#endif
#define FLAG(phase, owner, writer, item) \
    flag[(((phase) * N + (owner)) * N + (writer)) * SLICES + flag_of(phase, owner, writer, item) - 1]
#define WORD(owner, n, writer, item) word[(((owner) * 2 + parity(n)) * N + (writer)) * WORDS + (item)]
#define CONSUMED(phase, owner, writer) consumed[((phase) * N + (owner)) * N + (writer)]

byte cell[2 * N * 2 * N * SLICES];   /* messages, returns; by parity */
#ifdef LAMPORT
byte xword[2 * 2 * N * 2 * N * SLICES];   /* lamport_messages, lamport_returns: two words a slice */
#endif
byte flag[2 * N * N * SLICES];       /* message_ready, return_ready */
byte word[N * 2 * N * WORDS];        /* header + counts, entries + weights, by parity: the epoch of the value */
byte consumed[2 * N * N];            /* dispatch_consumed, combine_consumed */
#if MUTANT == TWO_STORES
byte value[N * 2 * N * WORDS];
#define VALUE(owner, n, writer, item) value[(((owner) * 2 + parity(n)) * N + (writer)) * WORDS + (item)]
#else
#define VALUE(owner, n, writer, item) WORD(owner, n, writer, item)
#endif

#ifdef PAIRS
byte pair[N * 2 * N];                /* return_rounds, by parity: the epoch of the value, which is batch(writer, epoch) */
#if MUTANT == ONE_PAIR
#define PAIR(owner, n, writer) pair[(owner) * 2 * N + (writer)]
#else
#define PAIR(owner, n, writer) pair[((owner) * 2 + parity(n)) * N + (writer)]
#endif
#ifdef CROSSED
#define batch(p, n) ((p) == 0 && (n) <= 2 -> 3 - (n) : (n))
#else
#define batch(p, n) (n)
#endif
#define has_tokens (slices(n, r) > 0)
#endif

byte sent[2 * N], received[2 * N];   /* the epoch words: phase * N + rank */
bool aborted[N];                     /* StateWord.ABORT */

/* The launches of stream q = rank * QUEUES + queue: phase * 4 + SEND and RECEIVE bits; 0 after the last. */
hidden byte program[N * QUEUES * LENGTH];
byte launch[N * QUEUES];             /* the running one */
byte left[N * QUEUES];               /* its tasks that have not ended */
bool failed[N * QUEUES];             /* one of its CTAs has given up */
bool stale[N * QUEUES];              /* the abort word was set when it began */
bool lost[N * QUEUES];               /* ghost: an item was not received */

#define OPERATION program[q * LENGTH + launch[q]]
#define PHASE (OPERATION / 4)
#define KIND (OPERATION & 3)
#define FINISHED (OPERATION == 0)

/* The round that a launch which sends works on. A fused one takes the next to be received, if it is the next to be sent,
 * too; the epoch words of a phase do not move while a launch runs, so all its CTAs decide alike. */
#define FUSES (KIND == (SEND | RECEIVE))
#define working ((FUSES -> received[PHASE * N + r] : sent[PHASE * N + r]) + 1)
#if MUTANT == UNCHECKED
#define in_order true
#else
#define in_order (!FUSES || sent[PHASE * N + r] == received[PHASE * N + r])
#endif
#ifdef MISTAKE
#define mistaken(r) (MISTAKE == ALL || (r) == 0)
#endif

#ifndef DOOMED
#define DOOMED 0
#endif
#if defined(DEATH)
bool dead;
#define dead_rank(p) (dead && (p) == DOOMED)
#define DEAD :: dead_rank(r) -> goto out
#else
#define dead_rank(p) false
#define DEAD
#endif
#if defined(SLOW)
#define TIMEOUTS
#define gone(p) true
#elif defined(DEATH)
#define TIMEOUTS
#define gone(p) (aborted[p] || dead_rank(p))
#elif defined(MISTAKE) || defined(CROSSED)
#define TIMEOUTS
#define gone(p) aborted[p]
#endif

#if N == 2
#define every(test) (test(0) && test(1))
#define some(test) (test(0) || test(1))
#else
#define every(test) (test(0) && test(1) && test(2))
#define some(test) (test(0) || test(1) || test(2))
#endif

#if MUTANT == NO_CONSUMED_WAIT
#define free_again(word) true
#elif MUTANT == WAIT_PREVIOUS
#define free_again(word) ((word) + 1 >= working)
#else
#define free_again(word) ((word) + 2 >= working)
#endif
#if MUTANT == EQUAL
#define arrived(word) ((word) == n)
#else
#define arrived(word) ((word) >= n)
#endif

#if MUTANT == UNDATED
#define ll_arrived(word) true
#else
#define ll_arrived(word) ((word) % DATES == n % DATES)
#endif
#if MUTANT == WAIT_FOR_ALL
#define awaited(phase, owner, writer, item) true
#elif MUTANT == OWN_SLOT
#define awaited(phase, owner, writer, item) travels(phase, owner, writer, item)
#else
#define awaited(phase, owner, writer, item) taken(phase, owner, writer, item)
#endif

/* Lamport words that have arrived. The own rank's clearing is over for its own later looks. */
#define is_sentinel(word) ((word) == SENTINEL || (word) == FADING)
#if MUTANT == SENTINEL_IS_DATA
#define whole(phase, owner, writer, item) \
    !(is_sentinel(XWORD(phase, owner, n, writer, item, 0)) && is_sentinel(XWORD(phase, owner, n, writer, item, 1)))
#elif MUTANT == FLAG_ALWAYS
#define whole(phase, owner, writer, item) false
#else
#define whole(phase, owner, writer, item) \
    !(is_sentinel(XWORD(phase, owner, n, writer, item, 0)) || is_sentinel(XWORD(phase, owner, n, writer, item, 1)))
#endif
#if MUTANT == NO_CLEAR
#define after_taking(word) (word)
#else
#define after_taking(word) FADING
#endif
#if MUTANT == PASS_OVER
#define taken(phase, owner, writer, item) \
    (travels(phase, owner, writer, item) && !((phase) == D && (owner) == 1 && n == 1))
#elif MUTANT == OWN_AWAITED || MUTANT == OWN_SLOT
#define taken(phase, owner, writer, item) due(phase, owner, writer, item)
#else
#define taken(phase, owner, writer, item) travels(phase, owner, writer, item)
#endif

#define writable(p) free_again(CONSUMED(PHASE, r, p))
#define unwritable(p) (!writable(p) && gone(p))
#define routed(p) ll_arrived(WORD(r, n, p, TABLE))
#define unrouted(p) (!routed(p) && gone(p))

/* ---- launches ------------------------------------------------------------------------------------------------- */

/* With a stream for each phase, a combine is launched after the dispatch of its batch (an event). */
#if ORDER == STREAMS && DISPATCHES
#define joined (PHASE == D || !(KIND & SEND) || received[r] > sent[N + r] || aborted[r])
#else
#define joined true
#endif
#define begun(task) ((left[q] & (task)) && joined)

/* A task's last step; the last task's ends the launch. Property (d): an incomplete round is never completed. */
#if MUTANT == COMPLETE_ANYWAY
#define complete true
#else
#define complete !failed[q]
#endif
inline end_task(task) {
    left[q] = left[q] & ~(task);
    if
    :: left[q] == 0 ->
        if
        :: complete && (KIND & RECEIVE) ->
            assert(!lost[q]);
            n = received[PHASE * N + r] + 1;
#ifdef MISTAKE
            assert(n + mistaken(r) <= 2);     /* nobody completes a round that a rank has not sent, or gave up on */
#endif
            check(PHASE);
            received[PHASE * N + r] = n
        :: else
        fi;
        if
        :: complete && (KIND & SEND) ->
            sent[PHASE * N + r] = (FUSES -> received[PHASE * N + r] : sent[PHASE * N + r] + 1)
        :: else
        fi;
        failed[q] = false;
        lost[q] = false;
        launch[q]++;
        stale[q] = aborted[r];
        left[q] = (FINISHED -> 0 : KIND | ACK)
    :: else
    fi;
    n = 0
}

/* Property (b): the data of the reader's own epoch, whole. */
inline check(phase) {
    p = 0;
    do
    :: p < N ->
        assert(phase == C || VALUE(r, n, p, TABLE) == n);
#ifdef PAIRS
        assert(phase == D || !has_tokens || PAIR(r, n, p) == n && batch(p, n) == batch(r, n));
#endif
        i = 1;
        do
        :: i <= items(phase, r, p) ->
            assert(phase == C || VALUE(r, n, p, i) == n);
            if
            :: !taken(phase, r, p, i)
            :: taken(phase, r, p, i) && !by_words(phase, r, p) -> assert(CELL(phase, r, n, p, i) == n)
            :: taken(phase, r, p, i) && by_words(phase, r, p) ->
                assert(XWORD(phase, r, n, p, i, 0) == after_taking(n));
                assert(XWORD(phase, r, n, p, i, 1) == after_taking(n))
            fi;
            i++
        :: else -> break
        od;
        p++
    :: else -> break
    od;
    i = 0; p = 0
}

/* ---- ACK: signal the rounds that were completed when the launch began -------------------------------------------- */

#if MUTANT == ACK_AFTER_WAIT
#define may_post (!(KIND & SEND) || every(writable))
#else
#define may_post true
#endif
#if MUTANT == ACK_ON_RECEIVE
#define signals (KIND & RECEIVE)
#else
#define signals true
#endif
#if MUTANT == ACK_OWN_ROUND
#define reads_done (received[PHASE * N + r] + ((KIND & RECEIVE) -> 1 : 0))
#else
#define reads_done received[PHASE * N + r]
#endif

/* A release: the clearing of the launches before this one is over. */
#if defined(LAMPORT) && MUTANT != WEAK_ACK
inline end_blanking() {
    i = 0;
    do
    :: i < 2 * N * SLICES ->
        if
        :: xword[2 * place(PHASE, r, received[PHASE * N + r], 0, 1) + i] == FADING ->
            xword[2 * place(PHASE, r, received[PHASE * N + r], 0, 1) + i] = SENTINEL
        :: else
        fi;
        i++
    :: else -> i = 0; break
    od
}
#else
#define end_blanking() skip
#endif

proctype Ack(byte r; byte q) {
    byte n, p, i, todo;
    do
    :: FINISHED -> break
    DEAD
#ifdef FINE
    :: d_step { begun(ACK) && may_post && !dead_rank(r) -> end_blanking(); todo = (1 << N) - 1 }
        do
        :: d_step { todo == 0 -> end_task(ACK) } break
        DEAD
        :: d_step { (todo & 1) && !dead_rank(r) -> CONSUMED(PHASE, 0, r) = reads_done; todo = todo & ~1 }
        :: d_step { (todo & 2) && !dead_rank(r) -> CONSUMED(PHASE, 1, r) = reads_done; todo = todo & ~2 }
#if N > 2
        :: d_step { (todo & 4) && !dead_rank(r) -> CONSUMED(PHASE, 2, r) = reads_done; todo = todo & ~4 }
#endif
        od
#else
    :: d_step { begun(ACK) && may_post && !dead_rank(r) ->
        end_blanking();
        p = 0;
        do
        :: p < N && signals -> CONSUMED(PHASE, p, r) = reads_done; p++
        :: else -> p = 0; break
        od;
        end_task(ACK) }
#ifdef DEATH
    :: atomic { r == DOOMED && begun(ACK) && !dead ->      /* signals to some and stops */
        end_blanking();
        do
        :: p < N -> p++
        :: p < N -> CONSUMED(PHASE, p, r) = reads_done; p++
        :: p == N -> p = 0; break
        od;
        dead -> goto out }
#endif
#endif
    od;
out: skip
}

/* ---- SEND ------------------------------------------------------------------------------------------------------ */

/* Signals of one launch, as bits of `todo`: word i to peer p is bit i * N + p, the flag of slice i (SLICES + i) * N + p. Of
 * a Lamport slice that is word 0; word 1 is (2 * SLICES + i) * N + p, and its flag (3 * SLICES + i) * N + p, which is
 * added to `todo` when the warp has stored all words.
 *
 * The step that passes the wait: from now on stores of round n may arrive, at any peer, in any order.
 * Property (a): whatever the slots held has been read, by each peer, up to and including round n-2. And (f): no round
 * is sent twice. */
inline overwrite(phase) {
    p = 0;
    do
    :: p < N ->
        assert(received[phase * N + p] + 2 >= n);
#ifdef PAIRS
        if
        :: phase == C ->
            assert(PAIR(p, n, r) != n);
            todo = todo | (1 << p)
        :: else
        fi;
#endif
        i = (phase == D -> TABLE : 1);
        do
        :: i <= items(phase, p, r) ->
            if
            :: phase == D ->
                assert(WORD(p, n, r, i) != n);
#if MUTANT == TWO_STORES
                WORD(p, n, r, i) = n;
#endif
                todo = todo | (1 << (i * N + p))
            :: else
            fi;
            if
            :: i > 0 && travels(phase, p, r, i) && by_words(phase, p, r) ->
                assert(XWORD(phase, p, n, r, i, 0) == SENTINEL && XWORD(phase, p, n, r, i, 1) == SENTINEL);
#if MUTANT == FLAG_FIRST
                FLAG(phase, p, r, i) = n;
#endif
                todo = todo | (1 << ((SLICES + i) * N + p)) | (1 << ((2 * SLICES + i) * N + p))
            :: i > 0 && !by_words(phase, p, r) && !direct(phase, p, r) ->
                if
                :: travels(phase, p, r, i) ->
                    assert(CELL(phase, p, n, r, i) != n);
                    CELL(phase, p, n, r, i) = TORN
                :: else
                fi;
#if MUTANT == FLAG_FIRST
                FLAG(phase, p, r, i) = n;
#endif
#if MUTANT == SILENT_OWNER
                if
                :: phase == D || i == 1 -> todo = todo | (1 << ((SLICES + i) * N + p))
                :: else
                fi
#else
                todo = todo | (1 << ((SLICES + i) * N + p))
#endif
            :: else
            fi;
            i++
        :: else -> break
        od;
        p++
    :: else -> break
    od;
    i = 0; p = 0
}

/* The flags of Lamport slice c at the peers that the warp which has stored to d stores to, when it has stored all words
 * and the slice has one. */
inline add_flags(c, d) {
    if
    :: PHASE == D -> peers = (1 << N) - 1
    :: else -> peers = 1 << (d)
    fi;
    if
    :: todo & ((peers << ((SLICES + (c)) * N)) | (peers << ((2 * SLICES + (c)) * N)))
    :: else ->
        peer = 0;
        do
        :: peer < N ->
            if
            :: (peers & (1 << peer)) && travels(PHASE, peer, r, c) && flagged(PHASE, peer, r, c) ->
                todo = todo | (1 << ((3 * SLICES + (c)) * N + peer))
            :: else
            fi;
            peer++
        :: else -> break
        od
    fi;
    peer = 0; peers = 0
}

inline arrive(d, item) {
    if
    :: item <= items(PHASE, d, r) && travels(PHASE, d, r, item) -> CELL(PHASE, d, n, r, item) = n
    :: else
    fi
}

/* Bit b, at peer b % N: an LL word, a Lamport word, or payload has arrived and its flag follows. */
inline signal(b) {
    if
#ifdef PAIRS
    :: (b) / N == TABLE && PHASE == C ->
        PAIR((b) % N, n, r) = n;
        todo = todo & ~(1 << (b))
    :: (b) / N <= SLICES && PHASE == D ->
#else
    :: (b) / N <= SLICES ->
#endif
        WORD((b) % N, n, r, (b) / N) = n;
#if MUTANT == TWO_STORES
        VALUE((b) % N, n, r, (b) / N) = n;
#endif
        todo = todo & ~(1 << (b))
    :: (b) / N > SLICES && !by_words(PHASE, (b) % N, r) ->
        todo = todo & ~(1 << (b));
        if
        :: behind_convoy((b) % N) ->
#if defined(CHUNK) && MUTANT != EARLY_FLAG
            arrive((b) % N, 1);
            arrive((b) % N, SLICES);
#else
            arrive((b) % N, (b) / N - SLICES);
#endif
            FLAG(PHASE, (b) % N, r, (b) / N - SLICES) = n
        :: else
        fi
#ifdef LAMPORT
    :: (b) / N > SLICES && (b) / N <= 3 * SLICES && by_words(PHASE, (b) % N, r) ->
        XWORD(PHASE, (b) % N, n, r, ((b) / N - 1) % SLICES + 1, ((b) / N > 2 * SLICES)) =
            sent_word(PHASE, (b) % N, r, ((b) / N - 1) % SLICES + 1, ((b) / N > 2 * SLICES));
        todo = todo & ~(1 << (b));
#if MUTANT != SILENT_FALLBACK
        add_flags(((b) / N - 1) % SLICES + 1, (b) % N)
#endif
    :: (b) / N > 3 * SLICES ->
        FLAG(PHASE, (b) % N, r, (b) / N - 3 * SLICES) = n;
        todo = todo & ~(1 << (b))
#endif
    fi
}

/* The rank that dies signals item i to some of its peers and then nothing more, for ever. */
inline stop_half_way() {
    do
    :: todo & (((1 << N) - 1) << i) -> break
    :: else -> i = i + N
    od;
    do
    :: p < N -> p++
    :: p < N && (todo & (1 << (i + p))) -> signal(i + p); p++
    :: p == N -> break
    od;
    i = 0; p = 0; todo = 0;
    dead -> goto out
}

/* Signals all of `todo`: item by item to all peers at once or, -DFINE, one word at a time in any order. */
inline post_all() {
    do
    :: d_step { todo == 0 && !dead_rank(r) -> end_task(SEND) } break
    DEAD
#ifdef TIMEOUTS
    :: failed[q] && todo != 0 -> todo = 0      /* the CTAs of these items gave up */
#endif
#ifdef FINE
    :: atomic { todo != 0 && !dead_rank(r) ->
        do
        :: (todo & (1 << i)) -> break
        :: (todo >> (i + 1)) != 0 -> i++
        od;
        signal(i);
        i = 0 }
#else
    :: d_step { todo != 0 && !dead_rank(r) ->
        do
        :: !(todo & (((1 << N) - 1) << i)) -> i = i + N
        :: else -> break
        od;
        p = i + N;
        do
        :: i < p && (todo & (1 << i)) -> signal(i); i++
        :: i < p && !(todo & (1 << i)) -> i++
        :: else -> break
        od;
        i = 0; p = 0 }
#endif
#if defined(DEATH) && !defined(FINE)
    :: atomic { r == DOOMED && todo != 0 && !dead -> stop_half_way() }
#endif
    od
}

proctype Send(byte r; byte q) {
    byte n, p, i;
#ifdef LAMPORT
    byte peer, peers;
    int todo;
#else
    short todo;
#endif
    do
    :: FINISHED -> break
    DEAD
    :: d_step { begun(SEND) && !dead_rank(r) -> n = working }
        do
        :: d_step { !dead_rank(r) && !stale[q] && in_order && every(writable) ->
#if MUTANT == ARENA_HEADER
            if
            :: PHASE == C ->
                do
                :: p < N -> assert(WORD(r, n, p, TABLE) == n); p++
                :: else -> p = 0; break
                od
            :: else
            fi;
#endif
            overwrite(PHASE) } break
#ifdef TIMEOUTS
        :: d_step { (aborted[r] || !in_order) && !dead_rank(r) -> aborted[r] = true; failed[q] = true } break
        :: d_step { !failed[q] && !dead_rank(r) && some(unwritable) -> aborted[r] = true; failed[q] = true }
#endif
        DEAD
        od;
        post_all()
    od;
out: skip
}

/* ---- RECEIVE --------------------------------------------------------------------------------------------------- */

/* Takes the items (peer b % N, slice b / N + 1), in order, or with -DFINE in any order. In dispatch the entries of the
 * slice come first, an LL word; whether it has rows here, and so a flag, follows from them. In combine it follows from
 * the rank's own ids. An item whose source is gone is lost, and the warps of the other items go on. */
#ifdef FINE
#define next(b) (todo & (1 << (b)))
#define others(b) (todo & ~(1 << (b)))
#else
#define others(b) 0
#define next(b) ((todo & ((2 << (b)) - 1)) == (1 << (b)))
#endif
#define listed(b) (PHASE == C || ll_arrived(WORD(r, n, (b) % N, (b) / N + 1)))
#define here(b) \
    (listed(b) && (!awaited(PHASE, r, (b) % N, (b) / N + 1) || arrived(FLAG(PHASE, r, (b) % N, (b) / N + 1)) || \
        by_words(PHASE, r, (b) % N) && whole(PHASE, r, (b) % N, (b) / N + 1)))
#if MUTANT == HEEDLESS
#define heeds(b) (!stale[q] || OPERATION == C * 4 + RECEIVE && by_words(PHASE, r, (b) % N))
#else
#define heeds(b) (!stale[q])
#endif
#ifdef TIMEOUTS
#if defined(LAMPORT)                   /* a warp that has taken word 0 when it gives up */
#define DROP_HALF(b) \
    :: d_step { next(b) && !dead_rank(r) && heeds(b) && by_words(PHASE, r, (b) % N) && listed(b) && \
        taken(PHASE, r, (b) % N, (b) / N + 1) && !is_sentinel(XWORD(PHASE, r, n, (b) % N, (b) / N + 1, 0)) && \
        (aborted[r] || !here(b) && gone((b) % N)) -> \
        TAKE_WORD(b, 0); \
        aborted[r] = true; failed[q] = true; lost[q] = true; todo = others(b) }
#else
#define DROP_HALF(b)
#endif
#define DROP(b) \
    DROP_HALF(b) \
    :: d_step { next(b) && !dead_rank(r) && (aborted[r] || !here(b) && gone((b) % N)) -> \
        aborted[r] = true; failed[q] = true; lost[q] = true; todo = others(b) }
#else
#define DROP(b)
#endif
#ifdef LAMPORT
#define TAKE_WORD(b, w) \
    assert(XWORD(PHASE, r, n, (b) % N, (b) / N + 1, w) == sent_word(PHASE, r, (b) % N, (b) / N + 1, w)); \
    XWORD(PHASE, r, n, (b) % N, (b) / N + 1, w) = after_taking(XWORD(PHASE, r, n, (b) % N, (b) / N + 1, w))
#else
#define TAKE_WORD(b, w) skip
#endif
#define TAKE(b) \
    :: d_step { next(b) && !dead_rank(r) && heeds(b) && here(b) -> \
        assert(PHASE == C || VALUE(r, n, (b) % N, (b) / N + 1) == n); \
        if \
        :: !taken(PHASE, r, (b) % N, (b) / N + 1) \
        :: taken(PHASE, r, (b) % N, (b) / N + 1) && !by_words(PHASE, r, (b) % N) -> \
            assert(CELL(PHASE, r, n, (b) % N, (b) / N + 1) == n) \
        :: taken(PHASE, r, (b) % N, (b) / N + 1) && by_words(PHASE, r, (b) % N) -> \
            TAKE_WORD(b, 0); \
            TAKE_WORD(b, 1) \
        fi; \
        todo = todo & ~(1 << (b)) } \
    DROP(b)

#ifdef PAIRS
#define PAIRED(p) (1 << (N * SLICES + (p)))
#ifdef TIMEOUTS
#define DROP_PAIR(p) \
    :: d_step { (todo & PAIRED(p)) && !dead_rank(r) && (aborted[r] || !ll_arrived(PAIR(r, n, p)) && gone(p)) -> \
        aborted[r] = true; failed[q] = true; lost[q] = true; todo = todo & ~PAIRED(p) }
#else
#define DROP_PAIR(p)
#endif
#define TAKE_PAIR(p) \
    :: d_step { (todo & PAIRED(p)) && !dead_rank(r) && !stale[q] && ll_arrived(PAIR(r, n, p)) -> \
        assert(PAIR(r, n, p) == n); \
        if \
        :: MUTANT != UNPAIRED && batch(p, n) != batch(r, n) -> aborted[r] = true; failed[q] = true; lost[q] = true \
        :: else \
        fi; \
        todo = todo & ~PAIRED(p) } \
    DROP_PAIR(p)
#else
#define TAKE_PAIR(p)
#endif

inline take_all() {
    do
    TAKE_PAIR(0)
    TAKE_PAIR(1)
#if N > 2
    TAKE_PAIR(2)
#endif
    :: d_step { todo == 0 && !dead_rank(r) -> end_task(RECEIVE) } break
    DEAD
    TAKE(0)
    TAKE(1)
#if N * SLICES > 2
    TAKE(2)
#endif
#if N * SLICES > 3
    TAKE(3)
#endif
#if N * SLICES > 4
    TAKE(4)
    TAKE(5)
#endif
    od
}

#if ORDER == FUSED
#define may_receive (!(left[q] & SEND))
#else
#define may_receive true
#endif
/* Every CTA of a launch that sends waits for "consumed", also one that only receives. Combine has no table. */
#define may_read (in_order && (!(KIND & SEND) || every(writable)) && (PHASE == C || every(routed)))

proctype Receive(byte r; byte q) {
    byte n, p, i;
    short todo;
    do
    :: FINISHED -> break
    DEAD
    :: d_step { begun(RECEIVE) && may_receive && !dead_rank(r) ->
        n = received[PHASE * N + r] + 1;
        do
        :: p < N ->
            i = 1;
            do
            :: i <= items(PHASE, r, p) ->
                todo = todo | ((PHASE == D || awaited(C, r, p, i)) << ((i - 1) * N + p));
                i++
            :: else -> i = 0; break
            od;
#ifdef PAIRS
            todo = todo | ((PHASE == C && has_tokens) << (N * SLICES + p));
#endif
            p++
        :: else -> break
        od;
        p = 0 }
        do
        :: d_step { !dead_rank(r) && may_read && (!stale[q] || OPERATION == C * 4 + RECEIVE) ->
            if
            :: PHASE == D ->                  /* counts give the row bases, headers the slices */
                do
                :: p < N -> assert(VALUE(r, n, p, TABLE) == n); p++
                :: else -> break
                od
            :: else
            fi;
            p = 0 } break
#ifdef TIMEOUTS
        :: d_step { (aborted[r] || !in_order) && !dead_rank(r) && OPERATION != C * 4 + RECEIVE ->
            aborted[r] = true; failed[q] = true; lost[q] = true; todo = 0 } break
        :: d_step { !failed[q] && !dead_rank(r) && (KIND & SEND) && some(unwritable) ->
            aborted[r] = true; failed[q] = true }
        :: d_step { !failed[q] && !dead_rank(r) && PHASE == D && some(unrouted) ->
            aborted[r] = true; failed[q] = true }
#endif
        DEAD
        od;
        take_all()
    od;
out: skip
}

#ifdef DEATH
active proctype Death() { dead = true }
#endif

/* ---- the calls of each rank ------------------------------------------------------------------------------------ */

#define fuses(r) (ORDER == ROLES || ORDER == FUSED || ORDER == MIXED && (r) == 0)
inline call(phase, kind, condition) {
    if
    :: condition ->
        q = r * QUEUES + (QUEUES - 1) * (phase);
        program[q * LENGTH + launch[q]] = (phase) * 4 + (kind);
        launch[q]++
    :: else
    fi
}

inline start(queue) {
    q = r * QUEUES + queue;
    launch[q] = 0;
    left[q] = KIND | ACK;
    run Ack(r, q);
    run Send(r, q);
    run Receive(r, q)
}

#define within(n) ((n) >= 1 && (n) <= ROUNDS)

init {
    short step;
    byte r, q;
    atomic {
        do
        :: r < N ->
            step = 1;
            do
            :: step < 2 * ROUNDS + OUTSTANDING ->
                if
#ifdef MISTAKE                                /* D1 A2 D3 W2: the third launch finds round 2 outstanding */
                :: mistaken(r) ->
                    call(D, SEND | RECEIVE, DISPATCHES && (step == 1 || step == 3));
                    call(D, SEND, DISPATCHES && step == 2);
                    call(D, RECEIVE, DISPATCHES && step == 4);
                    call(C, SEND | RECEIVE, COMBINES && (step == 1 || step == 3));
                    call(C, SEND, COMBINES && step == 2);
                    call(C, RECEIVE, COMBINES && step == 4)
                :: !mistaken(r) && fuses(r) ->
#else
                :: fuses(r) ->
#endif
                    call(D, SEND | RECEIVE, DISPATCHES && within(step));
                    call(C, SEND | RECEIVE, COMBINES && within(step - AHEAD))
                :: else ->
                    call(D, SEND, DISPATCHES && within(step));
                    call(D, RECEIVE, DISPATCHES && within(step + 1 - OUTSTANDING));
                    call(C, SEND, COMBINES && within(step + 1 - OUTSTANDING));
                    call(C, RECEIVE, COMBINES && within(step + 2 - 2 * OUTSTANDING))
                fi;
                step++
            :: else -> break
            od;
            start(0);
#if QUEUES > 1
            start(1);
#endif
            r++
        :: else -> break
        od
    }
}

#else  /* GRID */

/* ---- the CTAs of one rank ------------------------------------------------------------------------------------- *
 *
 * ROUNDS dispatch rounds of one rank, in stream order, in launches of CTAS CTAs. At most SLOTS of them are resident,
 * started in the order of their block index. Peers are left out: they behave like the rank itself, its own peer.
 *
 *   ORDER=ROLES  fused; the lower half of the CTAs sends, the upper half receives
 *   ORDER=FUSED  fused; every CTA sends and then receives
 *   ORDER=JOINS  fused; the upper half receives, the lower half first sends; with TAKE (see there)
 *   MOST         with ORDER=JOINS: all CTAs but one send, the one that announces among them
 *   ORDER=SPLIT  async, async, wait, async, wait, wait; every CTA sends or receives
 *   ROUTERS      the CTAs with the highest indices, which push the routing table, an LL word each
 *   MEET         some of the receives, by their tables, are tiled: their CTAs meet before a second pass
 *   PATIENT      with -DSLOW: the wait for the others of the meeting never times out
 *   TAKE         two messages more than sending CTAs: each has one dealt to it, and takes the others by number; so do
 *                receiving CTAs with ORDER=JOINS, where those that do not send have one dealt to them
 *   TURNS        with TAKE: numbers alternate by parity, and a launch clears those of the next round (as in combine)
 *   MISTAKE      fused, async, fused, wait: the third launch finds round 2 sent and not received, and fails
 *
 *   every CTA of a launch works on the launch's epoch, however late it starts
 *   every receiving CTA waits for the words of all route CTAs, and has those of its own round
 *   when a receiving launch has ended, num_rows is its epoch, or 0 after a timeout (-DSLOW: any wait may time out)
 *   a CTA in its second pass finds that every receiving CTA has ended its first one, of the same round
 *   no message is sent twice in a round (and none is left out, or its receiver waits for ever)
 *   with ORDER=JOINS each message is received once in a round
 *
 * The publication is a weak store. Until the launch has ended it may land after the retraction, another CTA's store to
 * the same word, unless the announcing CTA fences before its add on the exit counter and the last one after its own.
 */
#ifndef CTAS
#define CTAS 4
#endif
#ifndef SLOTS
#define SLOTS CTAS
#endif
#ifndef ROUTERS
#define ROUTERS 2
#endif
#define routes(id) ((id) + ROUTERS >= CTAS)
#if ORDER == ROLES
#define SENDERS (CTAS / 2)
#define sends(id) ((id) < SENDERS)
#define receives(id) (!sends(id))
#define ANNOUNCER (3 * CTAS / 4)
#elif ORDER == JOINS
#ifdef MOST
#define SENDERS (CTAS - 1)
#else
#define SENDERS (CTAS / 2)
#endif
#define sends(id) ((id) < SENDERS)
#define receives(id) true
#define ANNOUNCER (CTAS / 2)
#else
#define SENDERS CTAS
#define sends(id) true
#define receives(id) true
#define ANNOUNCER (CTAS / 2)
#endif
#if ORDER == ROLES || ORDER == JOINS
#define POSTER (CTAS / 4)    /* the middle of the sending CTAs */
#else
#define POSTER (CTAS / 2)
#endif
#ifdef TAKE
#define MESSAGES (SENDERS + 2)
#define is_message(i) true
#else
#define MESSAGES CTAS
#define is_message(i) sends(i)
#endif
#define MESSAGE(n, i) message[((n) & 1) * MESSAGES + (i)]
#define SHARE(n, id) table[((n) & 1) * CTAS + (id)]
#define FAILED 16
#if ORDER == ROLES && MUTANT != ALL_MEET
#define MEETING (CTAS - CTAS / 2)
#else
#define MEETING CTAS
#endif

byte send_epoch, receive_epoch, send_done, receive_done;    /* the state words */
bool abort_word;
#ifdef MEET
byte met;                                   /* state word: CTAs that have come to the meeting */
bool tiled;                                 /* the tables of the launch say so, to every CTA alike */
byte first_pass[CTAS];                      /* ghost: the last round of which a CTA has ended its first pass */
#endif
byte consumed;                              /* dispatch_consumed of the own rank */
byte num_rows, in_flight;                   /* the publication; 0, or what may still land on it */
bool fenced;                                /* the announcing CTA has counted itself out after a fence */
byte table[2 * CTAS];                       /* the word of each CTA, by parity */
byte message[2 * MESSAGES];                 /* by parity */
byte message_ready[MESSAGES];
#ifdef TAKE
#ifdef TURNS
byte taken[2];                              /* numbers that sending CTAs have taken, by parity */
#define TAKEN(n) taken[(n) & 1]
#else
byte taken;                                 /* state word: numbers that sending CTAs have taken */
#define TAKEN(n) taken
#endif
#endif
#if ORDER == JOINS
byte drawn;                                 /* state word: numbers of messages that receiving CTAs have taken */
byte got[MESSAGES];                         /* ghost: the last round in which a message was received */
#endif
byte resident;
byte failures;                              /* ghost: CTAs of the launch that gave up */

#if defined(SLOW) && MUTANT == SILENT_FAILURE
#define TIMEOUT :: alive = false
#elif defined(SLOW)
#define TIMEOUT :: abort_word = true; alive = false
#else
#define TIMEOUT
#endif
#if defined(SLOW) && !defined(PATIENT)
#define MEETING_TIMEOUT :: alive -> abort_word = true; alive = false
#else
#define MEETING_TIMEOUT
#endif

inline meet() {
    if
    :: alive -> d_step { first_pass[id] = received + 1; met++ }
    :: !alive && MUTANT == FAILED_JOINS -> met++
    :: else
    fi;
    if
    :: d_step { alive && met >= MEETING ->      /* and the second pass, at its earliest */
        do
        :: i < CTAS -> assert(!receives(i) || first_pass[i] == received + 1); i++
        :: else -> i = 0; break
        od }
    :: alive && abort_word -> alive = false
    MEETING_TIMEOUT
    :: !alive
    fi
}

inline leave(counter, ctas, ends) {
    d_step {
        fenced = fenced || (id == ANNOUNCER && MUTANT != UNORDERED);
        counter = counter + (alive -> 1 : 1 + FAILED);          /* one atomic */
        last = (counter % FAILED == ctas);
        whole = (counter == ctas || MUTANT == COMPLETE_ANYWAY);
        if
        :: last && !whole && (id == ANNOUNCER || fenced && MUTANT != LATE_FENCE) -> in_flight = 0
        :: else
        fi
    };
#if defined(MEET) && MUTANT == EARLY_RESET
    if
    :: id == ANNOUNCER && ((ends) & RECEIVE) -> met = 0
    :: else
    fi;
#endif
#if defined(TAKE) && !defined(TURNS) && MUTANT == EARLY_RESET
    if
    :: id == POSTER && ((ends) & SEND) -> taken = 0
    :: else
    fi;
#endif
    if
    :: last ->
        counter = 0;
#if defined(MEET) && MUTANT != NO_RESET && MUTANT != EARLY_RESET
        if
        :: (ends) & RECEIVE -> met = 0
        :: else
        fi;
#endif
#if defined(TAKE) && !defined(TURNS) && MUTANT != NO_RESET && MUTANT != EARLY_RESET
        if
        :: (ends) & SEND -> taken = 0
        :: else
        fi;
#endif
#if ORDER == JOINS && MUTANT != NO_RESET && MUTANT != DRAWS_GO_ON
        drawn = 0;
#endif
        if
        :: whole && ((ends) & SEND) -> send_epoch = sent + 1
        :: else
        fi;
        if
        :: whole && ((ends) & RECEIVE) -> receive_epoch = received + 1
        :: !whole && ((ends) & RECEIVE) -> num_rows = 0              /* retract */
        :: else
        fi
    :: else
    fi
}

#define draw(number) d_step { number = (MUTANT == DRAWS_FROM_NONE -> 0 : CTAS - SENDERS) + drawn; drawn++ }

proctype Cta(byte id; byte kind; byte sending; byte receiving) {
    byte sent, received, i;
#ifdef TAKE
    byte next;
#endif
    bool alive = true, last, whole;
    received = receive_epoch;
    if
    :: d_step { kind == (SEND | RECEIVE) ->
        sent = received;                                /* a fused launch works on one round */
        abort_word = abort_word || (send_epoch != received && MUTANT != UNCHECKED) }
    :: d_step { kind != (SEND | RECEIVE) -> sent = send_epoch }
    fi;
    assert(!(kind & SEND) || sent + 1 == sending);
    assert(!(kind & RECEIVE) || received + 1 == receiving);
#if MUTANT == STALE_OUTPUT
    if
    :: abort_word -> goto out
    :: !abort_word
    fi;
#endif
#if MUTANT != ACK_AFTER_WAIT
    if
    :: id == POSTER -> consumed = received
    :: else
    fi;
#endif
#if defined(TURNS) && MUTANT != NO_RESET
    if
    :: id == POSTER && (kind & SEND) -> TAKEN(MUTANT == EARLY_RESET -> sent + 1 : sent + 2) = 0
    :: else
    fi;
#endif
    if
    :: kind & SEND ->
        if
        :: abort_word -> alive = false
        :: !abort_word ->
            if
            :: consumed + 1 >= sent
            TIMEOUT
            fi
        fi;
#if MUTANT == ACK_AFTER_WAIT
        if
        :: id == POSTER -> consumed = received
        :: else
        fi;
#endif
        if
        :: alive && routes(id) -> SHARE(sent + 1, id) = sent + 1
        :: else
        fi;
        if
        :: alive && sends(id) ->
#ifdef TAKE
            i = id;
            do
            :: i < MESSAGES ->
                d_step { next = SENDERS + TAKEN(sent + 1); TAKEN(sent + 1)++ };  /* while this one is carried */
                d_step { assert(MESSAGE(sent + 1, i) != sent + 1); MESSAGE(sent + 1, i) = sent + 1 };
                message_ready[i] = sent + 1;
                i = next
            :: else -> i = 0; break
            od
#else
            d_step { assert(MESSAGE(sent + 1, id) != sent + 1); MESSAGE(sent + 1, id) = sent + 1 };
            message_ready[id] = sent + 1
#endif
        :: else
        fi
    :: else
    fi;
#if MUTANT == HALF_COUNTER
    if
    :: (kind & SEND) && sends(id) -> leave(send_done, (ORDER == ROLES -> CTAS / 2 : CTAS), SEND)
    :: else
    fi;
#endif
    if
    :: alive && (kind & RECEIVE) && receives(id) ->
        if
        :: abort_word -> alive = false
        :: !abort_word
        fi;
        do
        :: !alive || i == CTAS -> i = 0; break
        :: alive && i < CTAS && !routes(i) -> i++
        :: alive && i < CTAS && routes(i) && SHARE(received + 1, i) == received + 1 -> i++
        TIMEOUT
        od;
        if
        :: alive && id == ANNOUNCER -> d_step { num_rows = received + 1; in_flight = received + 1 }
        :: else
        fi;
#if ORDER == JOINS
        if
        :: sends(id) -> draw(i)
        :: !sends(id) -> i = id - SENDERS
        fi;
        do
        :: !alive || i >= MESSAGES -> i = 0; break
        :: alive && i < MESSAGES ->
            draw(next);                             /* while this one is received */
            if
            :: message_ready[i] >= received + 1 ->
                d_step { assert(MESSAGE(received + 1, i) == received + 1 && got[i] != received + 1);
                    got[i] = received + 1 }
            TIMEOUT
            fi;
            i = next
        od
#else
        do
        :: !alive || i == MESSAGES -> i = 0; break
        :: alive && i < MESSAGES && !is_message(i) -> i++
        :: alive && i < MESSAGES && is_message(i) && message_ready[i] >= received + 1 ->
            assert(MESSAGE(received + 1, i) == received + 1);
            i++
        TIMEOUT
        od
#endif
    :: else
    fi;
#ifdef MEET
    if
    :: tiled && (kind & RECEIVE) && receives(id) -> meet()
    :: else
    fi;
#endif
#if MUTANT == HALF_COUNTER
    if
    :: (kind & RECEIVE) && receives(id) -> leave(receive_done, (ORDER == ROLES -> CTAS / 2 : CTAS), RECEIVE)
    :: else
    fi;
#else
    if
    :: kind & SEND -> leave(send_done, CTAS, kind)
    :: else -> leave(receive_done, CTAS, kind)
    fi;
#endif
    d_step { failures = failures + (alive -> 0 : 1); resident-- };
    goto done;
out:
    skip;
    d_step { failures++; resident-- };
done:
    skip
}

#define starting(kind) (((kind) == (SEND | RECEIVE) -> receiving : sending) + 1)
inline launch_grid(kind) {
    id = 0;
#ifdef MEET
    if
    :: (kind) & RECEIVE -> tiled = true
    :: tiled = false
    fi;
#endif
    do
    :: id < CTAS -> atomic { resident < SLOTS -> resident++; run Cta(id, kind, starting(kind), receiving + 1); id++ }
    :: else -> id = 0; break
    od;
    resident == 0;
    if                                          /* the end of the launch: every store has landed */
    :: in_flight != 0 -> num_rows = in_flight
    :: true
    fi;
    d_step { in_flight = 0; fenced = false };
    if
    :: failures == 0 && ((kind) & SEND) -> sending++
    :: else
    fi;
    if
    :: failures == 0 && ((kind) & RECEIVE) -> receiving++; assert(num_rows == receiving)
    :: failures != 0 && ((kind) & RECEIVE) -> assert(num_rows == 0)
    :: else
    fi;
    assert(send_epoch == sending && receive_epoch == receiving);
    assert(send_done == 0 && receive_done == 0);
#if ORDER == JOINS
    d_step {
        do
        :: id < MESSAGES -> assert(failures != 0 || got[id] == receiving); id++
        :: else -> id = 0; break
        od };
#endif
    failures = 0
}

init {
    byte step = 1, id, sending, receiving;
#ifdef MISTAKE
    launch_grid(SEND | RECEIVE);
    launch_grid(SEND);
    launch_grid(SEND | RECEIVE);
    launch_grid(RECEIVE);
    assert(sending <= 2 && receiving <= 1)
#else
    do
#if ORDER == SPLIT
    :: step <= ROUNDS + OUTSTANDING - 1 ->
        if
        :: step <= ROUNDS -> launch_grid(SEND)
        :: else
        fi;
        if
        :: step >= OUTSTANDING -> launch_grid(RECEIVE)
        :: else
        fi;
        step++
#else
    :: step <= ROUNDS -> launch_grid(SEND | RECEIVE); step++
#endif
    :: else -> break
    od
#endif
}

#endif
